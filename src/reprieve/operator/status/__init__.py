"""The status controller: what happens to protected TrainJobs, in their `status.trainingProgress`."""
