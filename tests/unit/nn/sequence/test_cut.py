"""Batches that are cut along their sequence: every rank's part, labels before the cut, positions, and documents."""

import pytest
import torch

from mpispeed.base.errors import UsageError
from mpispeed.nn.sequence.cut import Shape, Wants, cut_inputs, digest, documents, shifted

HUB = Wants(positions=True, mask=False, shift=True, items=True)
SHAPES = [(1, 1), (2, 1), (1, 2), (2, 2), (3, 1)]
IDS = torch.arange(26).reshape(2, 13)


def parts(ulysses, ring, wants, *args, **kwargs):
    """What each rank gets, and the layout."""
    found = [cut_inputs(args, kwargs, Shape(ulysses, ring, rank), wants) for rank in range(ulysses * ring)]
    return [(args, kwargs) for args, kwargs, _ in found], found[0][2]


@pytest.mark.parametrize(("ulysses", "ring"), SHAPES)
def test_each_rank_gets_its_tokens_with_their_labels_and_positions(ulysses, ring):
    labels = IDS.clone()
    labels[1, 4:7] = -100
    found, layout = parts(ulysses, ring, HUB, input_ids=IDS, labels=labels, attention_mask=torch.ones(2, 13))
    assert layout.spans is None
    for rank, (_, own) in enumerate(found):
        places = layout.positions(rank)
        assert torch.equal(own["input_ids"], IDS[:, places])
        assert torch.equal(own["position_ids"], places.expand(2, -1))
        after = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
        assert torch.equal(own["shift_labels"], after[:, places])
        assert own["num_items_in_batch"] == (2 * 12 - 3) / (ulysses * ring)
        assert "attention_mask" not in own
    joined = layout.join([own["input_ids"] for _, own in found], 1)
    assert torch.equal(joined, IDS)


def test_inputs_by_place_are_cut_and_what_is_no_sequence_stays():
    weights, name = torch.ones(2), "kept"
    found, _ = parts(2, 1, Wants(), IDS, (IDS.float()[..., None], weights), name, labels=IDS)
    (ids, (wide, same), kept), own = found[1]
    assert torch.equal(ids, IDS[:, 7:])
    assert wide.shape == (2, 6, 1)
    assert same is weights and kept is name
    assert torch.equal(own["labels"], ids)  # not shifted: only causal models of transformers shift
    assert own.keys() == {"labels"}


def test_an_own_model_gets_positions_if_it_takes_them_and_its_part_of_the_mask():
    mask = torch.ones(2, 13)
    mask[0, 10:] = 0
    found, layout = parts(2, 1, Wants(positions=True), IDS, attention_mask=mask)
    assert layout.spans == (((0, 10),), ((0, 13),))
    assert torch.equal(found[1][1]["attention_mask"], mask[:, 7:])
    assert found[1][1]["position_ids"].tolist() == [list(range(7, 13))] * 2


@pytest.mark.parametrize(
    ("given", "spans"),
    [
        ({}, None),
        ({"position_ids": torch.arange(6)[None]}, None),
        ({"position_ids": torch.tensor([[0, 1, 2, 0, 1, 0]])}, [[(0, 3), (3, 5), (5, 6)]] * 2),
        ({"position_ids": torch.arange(12).reshape(2, 1, 6)}, None),  # of several kinds: nothing of documents
        ({"attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])}, [[(2, 6)], [(0, 6)]]),
        ({"attention_mask": torch.tensor([[0] * 6, [1] * 6])}, [[], [(0, 6)]]),
        (
            {
                "attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]]),
                "position_ids": torch.tensor([[1, 0, 1, 0, 1, 2], [0, 1, 2, 3, 4, 5]]),
            },
            [[(1, 3), (3, 6)], [(0, 4)]],
        ),
    ],
)
def test_documents_are_told_by_positions_and_masks(given, spans):
    found = documents(2, 6, **given)
    assert found == (None if spans is None else tuple(map(tuple, spans)))


def test_documents_are_told_by_their_ends_which_the_model_does_not_see():
    ends = torch.tensor([0, 4, 4, 13])
    given = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 9, "max_length_k": 9}
    found, layout = parts(2, 1, HUB, input_ids=IDS[:1], **given)
    assert layout.spans == (((0, 4), (4, 13)),)
    assert found[0][1]["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 2]]
    assert found[0][1].keys() == {"input_ids", "position_ids"}


def test_positions_of_several_kinds_and_of_no_batch_are_cut_at_their_end():
    kinds = torch.arange(78).reshape(3, 2, 13)
    found, _ = parts(1, 2, HUB, input_ids=IDS, position_ids=kinds, cache_position=torch.arange(13))
    assert torch.equal(found[1][1]["position_ids"], kinds[..., 4:10])
    assert found[1][1]["cache_position"].tolist() == [4, 5, 6, 7, 8, 9]


def test_a_given_number_of_items_is_of_all_ranks():
    found, _ = parts(2, 1, HUB, input_ids=IDS, shift_labels=IDS, labels=IDS, num_items_in_batch=torch.tensor(50))
    assert found[0][1]["num_items_in_batch"] == 25.0
    assert torch.equal(found[0][1]["shift_labels"], IDS[:, :7])


def test_more_ranks_than_tokens_leave_some_without():
    found, _ = parts(2, 2, HUB, input_ids=IDS[:, :2], labels=IDS[:, :2])
    assert sorted(own["input_ids"].shape[1] for _, own in found) == [0, 0, 1, 1]
    assert found[0][1]["num_items_in_batch"] == 0.5


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"count": 3}, "without a sequence"),
        ({"input_ids": IDS, "attention_mask": torch.ones(2, 1, 13, 13)}, r"shape \(2, 1, 13, 13\)"),
        ({"input_ids": IDS[:, :3], "attention_mask": torch.tensor([[1, 1, 1], [1, 0, 1]])}, "row 1 is zero inside"),
        ({"input_ids": IDS, "labels": torch.tensor([1, 0])}, r"labels of shape \(2,\)"),
        ({"input_ids": IDS[:1], "cu_seq_lens_q": torch.tensor([0, 12])}, "from 0 to 13"),
    ],
)
def test_what_cannot_be_cut_is_refused(given, words):
    with pytest.raises(UsageError, match=words):
        cut_inputs((), given, Shape(2, 1, 0), HUB)


def test_labels_are_shifted_within_rows():
    assert shifted(torch.tensor([[1, 2, 3], [4, 5, 6]])).tolist() == [[2, 3, -100], [5, 6, -100]]


def test_batches_are_told_apart_by_their_tensors():
    same = digest((IDS,), {"x": [IDS.float()], "name": "a"})
    assert digest((IDS.clone(),), {"x": [IDS.float()], "name": "b"}) == same
    assert digest((IDS.flip(0),), {"x": [IDS.float()]}) != same
    assert digest((IDS.reshape(13, 2),), {"x": [IDS.float()]}) != same
    assert digest((IDS.to(torch.bfloat16), torch.zeros(0, 3)), {}) != digest((IDS.to(torch.float16),), {})
