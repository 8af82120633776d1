"""TrainJobs as people use them: their progress, pause and resume, logs. For the command line, the SDK, dashboards."""
