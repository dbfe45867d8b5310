"""recipes/tools/significance.py: tests of differences between runs against SciPy and by hand."""

import json

import pandas as pd
import pytest
from conftest import load, tsv
from scipy import stats


def test_wilcoxon_and_mcnemar(tmp_path, program):
    tool = load("recipes/tools/significance.py")
    differences = pd.Series([0.5, 0.25, -0.1, 0.1, 0.6])
    expected = stats.wilcoxon([0.5, 0.25, -0.1, 0.1, 0.6]).pvalue
    assert tool.wilcoxon(differences) == pytest.approx(expected)
    noise = pd.Series([0.5, 0.25, 1e-17, -0.1 + 1e-17, 0.1, 0.6])  # rounding decides no rank
    assert tool.wilcoxon(noise) == pytest.approx(tool.wilcoxon(noise.round(3)))
    assert abs(tool.wilcoxon(noise) - stats.wilcoxon(noise).pvalue) > 1e-3
    hits = pd.Series([1, 1, 1, 1, -1, 0])
    assert tool.mcnemar(hits) == pytest.approx(2 * (1 + 5) / 2**5)  # 4 against 1: two tails
    assert [tool.wilcoxon(hits * 0), tool.mcnemar(hits * 0)] == pytest.approx([1, 1])
    path = tmp_path / "metrics.claims.tsv"
    values = "b|1|0.5|1; b|2|0.1|0; b|3||; b|4|0.2|0; a|1|0.1|0; a|2|0.2|0; a|3|0.3|0; a|4|0.8|1"
    tsv(path, ["run", "claim_id", "MRR@5", "Success@1"], values)
    words = f"{path} --measures"
    shown = program("tools/significance", f"{words} MRR@5 Success@1", cwd=tmp_path).stdout
    lines = [line.split("\t") for line in shown.splitlines()]
    assert lines[0] == "measure run claims difference won lost p_wilcoxon p_mcnemar".split()
    # b comes first, and has no value for the third claim
    mean = (0.1 - 0.5 + 0.2 - 0.1 + 0.8 - 0.2) / 3
    assert lines[1][:3] == ["MRR@5", "a", "3"] and float(lines[1][3]) == pytest.approx(mean)
    assert lines[1][7] == "" and lines[2][4:6] == ["1", "1"] and float(lines[2][7]) == 1
    lacking = {"counts": {"b": {"claims without rows": 0}, "a": {"claims without rows": 1}}}
    (tmp_path / "metrics.json").write_text(json.dumps(lacking))
    done = program("tools/significance", f"{words} MRR@5", cwd=tmp_path)
    assert done.stderr.startswith("warning: a: left out, without rows for a tenth of the claims")
    (tmp_path / "metrics.json").unlink()
    done = program("tools/significance", f"{words} nDCG", cwd=tmp_path)
    assert done.returncode == 2 and "no measure nDCG; it has MRR@5, Success@1" in done.stderr
