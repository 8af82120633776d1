"""A thousand progressing TrainJobs: how old their status gets, and what the operator costs.

On the test cluster (Linux, root; `make cluster-build` compiles it): a real API server and the operator as it is
deployed. The jobs are stand-ins, see tests/cluster/kit/operator_load.py.

python -m benchmarks --only operator
"""

from __future__ import annotations

from tests.cluster.kit.cluster import session_cluster
from tests.cluster.kit.objects import HOST_PATH, pod_spec, reprieve_runtime
from tests.cluster.kit.operator_deployment import deployed
from tests.cluster.kit.operator_load import under_load

JOBS, SECONDS, WARM_UP_S = 1000, 180.0, 60.0
NAMESPACE = "operator-load"


def figures() -> dict[str, float]:
    runtime = reprieve_runtime("reprieve-torch", pod_spec(container="node", environment={"PATH": HOST_PATH}))
    runtime["kind"] = "ClusterTrainingRuntime"
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
    with session_cluster(full=False) as cluster, deployed(cluster) as operator:
        cluster.kubectl.apply(namespace, runtime)
        try:
            load = under_load(
                cluster,
                operator,
                cluster.kubectl.for_namespace(NAMESPACE),
                jobs=JOBS,
                seconds=SECONDS,
                warm_up_s=WARM_UP_S,
            )
        finally:
            cluster.kubectl.run("delete", "namespace", NAMESPACE, timeout_s=600)
            cluster.kubectl.delete("clustertrainingruntime", "reprieve-torch")
    return {
        "operator.jobs": load.jobs,
        "operator.staleness_p99_s": load.staleness_p99_s,
        "operator.cores": load.cores,
        "operator.rss_mib": load.rss_mib,
        "operator.polls_per_s": load.polls_per_s,
        "operator.writes_per_poll": load.writes_per_poll,
    }


def show(found: dict[str, float]) -> None:
    print(
        f"{found['operator.jobs']:.0f} progressing TrainJobs: data in status at most "
        f"{found['operator.staleness_p99_s']:.0f} s old (p99), {found['operator.cores']:.2f} cores, "
        f"{found['operator.rss_mib']:.0f} MiB, {found['operator.polls_per_s']:.1f} polls a second, "
        f"{found['operator.writes_per_poll']:.2f} writes a poll"
    )


if __name__ == "__main__":
    show(figures())
