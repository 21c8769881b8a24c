"""The example of a model of transformers with experts, started as its first lines say."""

from tests.jobs.test_train_moe import EXAMPLE as OTHER
from tests.jobs.test_train_moe import LINES, losses

EXAMPLE = OTHER.with_name("train_mixtral.py")


def test_the_loss_falls_and_transformers_reads_the_model(job, tmp_path):
    done = job(2, EXAMPLE, "--ep-size", 2, "--stage", 3, "--steps", 20, "--out", tmp_path)
    (_, first), (_, last) = losses(done)
    assert last < first < 5.6  # that of a byte at random: ln 256
    saved = float(done.stdout.partition("saved loss ")[2].split()[0])
    assert abs(saved - last) < 0.5


def test_the_example_is_short():
    assert len(EXAMPLE.read_text().splitlines()) <= LINES
