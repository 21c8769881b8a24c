"""A build that fails at once leaves nothing that is in the way of the next."""

import pytest

from mpispeed.mesh.backends.solo import solo_comm
from mpispeed.mesh.sim import run
from mpispeed.tokens_build.errors import BuildError
from mpispeed.tokens_build.inputs import Reading
from mpispeed.tokens_build.job import Request, build
from mpispeed.tokens_build.work_folder import folder_of


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_mistake_at_the_first_part_leaves_nothing_to_remove(tmp_path, ranks):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "ab"}\n')
    output = tmp_path / "s.h5"

    def wrong(world):
        with pytest.raises(BuildError, match="it has no 'txet'"):
            build(world.comm, Request(output, [path], "byte", reading=Reading(field="txet"), part_bytes=1 << 20))

    run(ranks, wrong)
    assert not folder_of(output).exists()
    assert build(solo_comm(), Request(output, [path], "byte")).tokens == 3
