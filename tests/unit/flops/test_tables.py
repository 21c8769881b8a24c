"""The printed report: numbers, lines, and the tree of modules."""

import pytest

from mpispeed.flops.tables import (
    Facts,
    Row,
    Times,
    Totals,
    duration_text,
    flops_text,
    macs_text,
    params_text,
    rate_text,
    report,
    summary,
    top_modules,
    tree,
)

ROWS = [
    Row("", "Net", params=1000, flops=4000, macs=2000, seconds=0.5, forward=3500, backward=7000, recompute=500),
    Row("first", "Layer", "in=1", 400, 1000, 500, 0.1, 1000, 2000),
    Row("rest", "Sequential", "", 600, 3000, 1500, 0.3, 2500, 5000, 500),
    Row("rest.0", "Layer", "in=2", 600, 3000, 1500, 0.2, 2500, 5000, 500),
]


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (flops_text(866_076_672), "866.08 M"),
        (macs_text(426_516_480), "426.52 MMACs"),
        (params_text(61_706), "61.71 K"),
        (params_text(1_500_000_000), "1.50 B"),
        (flops_text(1.5e9), "1.50 G"),
        (flops_text(2.25e15), "2250.00 T"),
        (flops_text(0), "0"),
        (flops_text(999), "999"),
        (macs_text(100), "100 MACs"),
        (flops_text(0.5), "0.50"),
        (rate_text(82, 1e-12), "82.00 TFLOPS"),
        (rate_text(5, 0), "0 FLOPS"),
        (duration_text(0.07667), "76.67 ms"),
        (duration_text(34.09e-6), "34.09 us"),
        (duration_text(1.254), "1.25 s"),
    ],
)
def test_numbers_have_two_decimals_in_steps_of_a_thousand(shown, expected):
    assert shown == expected


def test_top_modules_are_those_of_each_depth_the_deepest_too():
    text = top_modules(ROWS, -1, 1)
    assert text.splitlines()[1:] == [
        "depth 0:",
        "    params      - {'Net': '1.00 K'}",
        "    MACs        - {'Net': '2.00 KMACs'}",
        "    fwd latency - {'Net': '500.00 ms'}",
        "depth 1:",
        "    params      - {'Sequential': '600'}",
        "    MACs        - {'Sequential': '1.50 KMACs'}",
        "    fwd latency - {'Sequential': '300.00 ms'}",
        "depth 2:",
        "    params      - {'Layer': '600'}",
        "    MACs        - {'Layer': '1.50 KMACs'}",
        "    fwd latency - {'Layer': '200.00 ms'}",
    ]
    assert "depth 2" not in top_modules(ROWS, 1, 1)
    assert top_modules(ROWS, 7, 1) == text
    assert "{'Sequential': '600', 'Layer': '400'}" in top_modules(ROWS, 1, 2)


def test_the_tree_has_every_module_with_its_numbers():
    assert tree(ROWS).splitlines() == [
        "Net(",
        "  1.00 K, 100.00% Params, 2.00 KMACs, 100.00% MACs, 500.00 ms, 100.00% latency, 8.00 KFLOPS, 3.50 K fwd, "
        "7.00 K bwd, 500 recompute",
        "  (first): Layer(400, 40.00% Params, 500 MACs, 25.00% MACs, 100.00 ms, 20.00% latency, 10.00 KFLOPS, "
        "1.00 K fwd, 2.00 K bwd, 0 recompute, in=1)",
        "  (rest): Sequential(",
        "    600, 60.00% Params, 1.50 KMACs, 75.00% MACs, 300.00 ms, 60.00% latency, 10.00 KFLOPS, 2.50 K fwd, "
        "5.00 K bwd, 500 recompute",
        "    (0): Layer(600, 60.00% Params, 1.50 KMACs, 75.00% MACs, 200.00 ms, 40.00% latency, 15.00 KFLOPS, "
        "2.50 K fwd, 5.00 K bwd, 500 recompute, in=2)",
        "  )",
        ")",
    ]


def test_rates_follow_from_counts_and_times():
    times = Times(forward=1.0, backward=2.0, step=1.0, before=2.0)
    totals = Totals(flops=32000, macs=16000, forward=30000, backward=60000, recompute=4000, params=2000)
    facts = Facts(4, 4, 1, 1, 8, 2, 1.0, times, totals, peak=180_000.0, unknown={"aten.odd": 3})
    lines = dict(summary(ROWS[0], facts))
    assert lines["micro-batches per step; what follows is of one unless it says step"] == "2"
    assert lines["fwd flops of model"] == "4.00 K"  # of one replica and micro-batch
    assert lines["fwd FLOPS per GPU = fwd flops per GPU / fwd latency"] == "8.00 KFLOPS"
    assert lines["bwd latency"] == "1.00 s"
    assert lines["bwd FLOPS per GPU = 3 * fwd flops per GPU / bwd latency"] == "12.00 KFLOPS"
    assert lines["fwd+bwd FLOPS per GPU = 4 * fwd flops per GPU / (fwd+bwd latency)"] == "10.67 KFLOPS"
    assert lines["iter latency of a step"] == "4.00 s"
    assert lines["FLOPS per GPU = 4 * fwd flops per GPU / iter latency"] == "8.00 KFLOPS"
    assert lines["samples/second"] == "16.00"
    assert lines["FLOPS per GPU = (forward + backward) / time of the step before / world size"] == "11.25 KFLOPS"
    assert lines["peak FLOPS per GPU"] == "45.00 KFLOPS"
    assert lines["model flops utilisation (MFU)"] == "25.00%"
    assert lines["operators without a formula, which count as 0 (calls)"] == "aten.odd (3)"


def test_experts_and_slices_have_lines_where_there_are_any():
    totals = Totals(flops=8000, params=5000, expert_params=3000)
    lines = dict(summary(ROWS[0], Facts(2, 1, 2, totals=totals)))
    assert lines["fwd flops of model, slices and stages together"] == "8.00 K"
    assert (lines["params of model"], lines["expert params of model"]) == ("5.00 K", "3.00 K")
    assert lines["non-expert params of model"] == "2.00 K"
    alone = dict(summary(ROWS[0], Facts()))
    assert not {"params of model", "bwd latency", "samples/second", "peak FLOPS per GPU"} & alone.keys()


def test_a_report_without_details_has_no_tree():
    full, short = (report(ROWS, Facts(), step=3, depth=-1, top=1, detailed=detailed) for detailed in (True, False))
    assert "Profile Summary at step 3:" in short
    assert "Detailed Profile" in full and "Detailed Profile" not in short
    assert full.startswith(short[: short.rindex("\n---")])
