"""One save: request, plan, staging, writing and commit, in the foreground or the background."""
