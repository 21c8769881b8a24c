"""Names of states of jobs."""

import pytest

from mpispeed.walltime.job_states import is_over, is_running

OVER, RUNNING, NEITHER = (True, False), (False, True), (False, False)


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("COMPLETED", OVER), ("CANCELLED", OVER), ("TIMEOUT", OVER), ("PREEMPTED", OVER), ("NODE_FAIL", OVER),
        ("RUNNING", RUNNING), ("SIGNALING", RUNNING), ("RUNNING,SIGNALING", RUNNING), ("SUSPENDED", RUNNING),
        ("PENDING", NEITHER), ("CONFIGURING", NEITHER), ("COMPLETING", NEITHER), ("CANCELLED,COMPLETING", NEITHER),
        ("COMPLETED,SIGNALING", NEITHER), ("STAGE_OUT", NEITHER), ("REQUEUED", NEITHER), ("SPECIAL_EXIT", NEITHER),
        ("A_NEW_ONE", NEITHER), ("", NEITHER),
    ],
)  # fmt: skip
def test_what_states_mean(state, expected):
    assert (is_over(state), is_running(state)) == expected
