"""Builds, starts and removes the test cluster: `python -m tests.cluster.rig build|up|down`.

`build` compiles pinned Go modules into `~/.cache/reprieve/cluster/<version digest>/`. `up` starts Kubernetes from these
binaries as plain processes, in a network namespace and a cgroup of the cluster's own. `down` kills everything in that
cgroup and removes the namespace, which takes bridges, veths and iptables chains with it. Only the standard library is
used: the cluster can be built while the environment of the project is still being installed.
"""
