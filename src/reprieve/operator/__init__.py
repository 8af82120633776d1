"""The operator: admission of TrainJobs, and the resource definition that they are checked against."""
