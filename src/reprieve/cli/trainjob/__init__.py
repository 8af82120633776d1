"""The verbs for TrainJobs: what `status`, `pause`, `resume`, `logs` and `ls` do with `trainjob/NAME`."""
