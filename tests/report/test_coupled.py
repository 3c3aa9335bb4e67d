from __future__ import annotations

from moonpool.report.coupled import Borne, coupled_findings


def test_gains_are_over_each_and_over_the_best_of_them() -> None:
    separate = [Borne("3P + 1D", (2.0, 2.0, 2.0))]
    coupled = [Borne("a", (1.0, 0.0, 4.0)), Borne("b", (1.6, 1.0, 1.0))]
    first, a, b, best = coupled_findings(separate, coupled, {"a": "+75%"})
    assert (first.what, first.ours, first.comment) == ("3P + 1D", "2 · 2 · 2", "")
    assert (a.paper, a.comment) == ("+75%", "3P + 1D +100% · from none · -50%")
    assert (b.paper, b.ours) == ("-", "1.6 · 1 · 1")
    assert (best.ours, best.comment) == ("1.6 · 1 · 4", "3P + 1D +25% · +100% · -50%")
