"""A hundred progressing jobs: fresh status, a small operator. benchmarks/operator.py has a thousand."""

from __future__ import annotations

import pytest

from tests.cluster.kit.cluster import Cluster
from tests.cluster.kit.operator_deployment import Operator
from tests.cluster.kit.operator_load import under_load
from tests.cluster.rig.kubectl import Kubectl

JOBS, SECONDS = 100, 60.0

pytestmark = pytest.mark.timeout(300)


@pytest.mark.usefixtures("runtime")
def test_the_status_of_many_jobs_is_fresh_and_the_operator_stays_small(
    cluster: Cluster, operator: Operator, namespace: Kubectl
) -> None:
    load = under_load(cluster, operator, namespace, jobs=JOBS, seconds=SECONDS)
    assert load.staleness_p99_s <= 60, load
    assert load.cores <= 0.3, load
    assert load.rss_mib <= 300, load
    assert load.polls_per_s >= JOBS / 60 / 2, load
    assert load.writes_per_poll <= 1, load
