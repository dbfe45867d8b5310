"""recipes/tools/combo_score.py: the formula by hand, ties (bad_recipes.tsv: what is refused)."""

from math import log

import pytest
from conftest import RUN, VERDICTS, cells, facts, read, tsv

# sigmoid(log 3) = 3 / 4, sigmoid(0) = 1 / 2, sigmoid(-log 3) = 1 / 4
SCORES = f"c3|1|1|{log(3)}; c3|2|2|0; c3|3|3|{-log(3)}; c4|2|1|0; c4|1|2|0"
LABELS = """c3|1|1|9|NEI|0|0|1; c3|2|2|8|SUPPORTS|.6|.2|.2; c3|3|3|7|REFUTES|.1|.9|0;
    c4|1|1|9|NEI|0|.4|.6; c4|2|2|8|NEI|.4|0|.6; c5|1|1|9|SUPPORTS|1|0|0"""


@pytest.fixture
def combo(program, toy):
    """combo("..."): the program on these scores and verdicts."""
    tsv(toy / "run.tsv", RUN, SCORES)
    tsv(toy / "v.tsv", VERDICTS, LABELS)
    return lambda words: program("tools/combo_score", f"run.tsv v.tsv {words}", cwd=toy)


def test_the_formula_by_hand(toy, combo):
    [out] = facts(combo("--alpha 0.25"))["made"]
    run = read(toy / out)
    assert list(run) == RUN
    assert run["claim_id"].tolist() == ["c3", "c3", "c3", "c4", "c4"]
    assert run["abstract_id"].tolist() == ["2", "1", "3", "2", "1"]  # c4: a tie, as in the run
    assert run["rank"].tolist() == [1, 2, 3, 1, 2]
    wanted = [
        0.75 * 1 / 2 + 0.25 * (0.6 + 0.2),
        0.75 * 3 / 4 + 0.25 * (0 + 0),
        0.75 * 1 / 4 + 0.25 * (0.1 + 0.9),
        0.75 * 1 / 2 + 0.25 * (0.4 + 0),
        0.75 * 1 / 2 + 0.25 * (0 + 0.4),
    ]
    assert run["score"].tolist() == pytest.approx(wanted)
    assert facts(combo("--alpha 0.25"))["made"] == []


@pytest.mark.parametrize("alpha, order", cells("0|123; 0.5|231; 1|321"))
def test_alpha_goes_from_the_reranker_to_the_verifier(toy, combo, alpha, order):
    facts(combo(f"--alpha {alpha} --out new.tsv"))
    assert read(toy / "new.tsv")["abstract_id"].tolist()[:3] == list(order)
