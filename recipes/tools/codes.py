"""Codes of narratives, for recipes/narratives.py: their files and measures."""
import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd

ROOT = Path(__file__).resolve().parents[2]
KIT = SimpleNamespace(**runpy.run_path(str(ROOT / "05_classify.py")))  # defines its functions
NONE = "0_0"  # the code of a claim without a narrative
FEW = 3  # held-out claims that a code needs for a threshold of its own
MEASURES = ["macro_F1", "micro_F1", "weighted_F1"]

def alone(codes):
    """Return codes without NONE where there is another one."""
    return [code for code in codes if code != NONE] or [NONE]

# -------------------- Files
def read_taxonomy(path):
    """Return {code: "name: description"}."""
    table = pd.read_csv(path, sep="\t", dtype=str, keep_default_na=False)
    if list(table)[:3] != ["code", "name", "description"] or NONE not in set(table["code"]):
        KIT.fail(path, f"want columns code, name, description, and a row for {NONE}")
    return dict(zip(table["code"], table["name"] + ": " + table["description"]))

def read_claims(path):
    """Return {claim_id: claim}."""
    columns = ["claim_id", "claim"]
    return dict(KIT.read_table(path, columns)[columns].to_numpy())

def read_codes(path, claims):
    """Return {claim_id: its codes}; claims: those that it may be about."""
    table = KIT.read_table(path, ["claim_id", "codes"], claim_id=claims)
    return {row.claim_id: re.findall(r"[^;\s]+", row.codes) for row in table.itertuples()}

def read_labelled(claims_path, codes_path, taxonomy):
    """Return [(claim, codes)] of claims to learn from, with codes of the taxonomy."""
    claims, labelled, unknown = read_claims(claims_path), [], 0
    for name, codes in read_codes(codes_path, claims).items():
        known = [code for code in codes if code in taxonomy]
        unknown += len(codes) - len(known)
        if known:
            labelled.append((claims[name], known))
    if unknown:
        KIT.warn(codes_path, f"{unknown} codes that the taxonomy lacks, left out")
    return labelled

def write_codes(codes, task, args, **facts):
    """Write {claim_id: codes} and return the facts."""
    rows = [(name, ";".join(found)) for name, found in codes.items()]
    table = pd.DataFrame(rows, columns=["claim_id", "codes"])
    with KIT.written(args.out, task, **facts) as path:
        table.to_csv(path, sep="\t", index=False, lineterminator="\n")
    return {"made": [args.out], "claims": len(rows), **facts}

# -------------------- Measures
def counts_of(gold, found, codes):
    """Return [3, claims, codes]: what is right, what is named, and what is gold."""
    rows = [[[code in one.get(name, ()) for code in codes] for name in gold]
            for one in (found, gold)]
    named, true = np.array(rows, dtype=float)
    return np.stack([named * true, named, true])

def f1_of(right, named, true):
    """Return F1, NaN where nothing is named and nothing is gold."""
    with np.errstate(invalid="ignore"):
        return 2 * right / (named + true)

def measures_of(right, named, true):
    """Return MEASURES, [..., 3], from counts by code, [..., codes].

    The macro F1 is the mean over codes that are gold or named, as scikit-learn computes it with a
    MultiLabelBinarizer that is fitted on both.
    """
    f1 = f1_of(right, named, true)
    micro = f1_of(*(one.sum(-1) for one in (right, named, true)))
    weighted = np.nansum(f1 * true, -1) / true.sum(-1)
    return np.stack([np.nanmean(f1, -1), micro, weighted], -1)

def intervals(counts, seed, resamples=2000):
    """95 % percentile bootstrap intervals over claims (Efron 1979), [2, measures]."""
    claims, rng = counts.shape[1], np.random.default_rng(seed)
    draws = rng.multinomial(claims, np.full(claims, 1 / claims), size=resamples)
    return np.quantile(measures_of(*(draws @ one for one in counts)), (0.025, 0.975), axis=0)

def score(gold, found, seed):
    """Return measures with intervals as {column: number}, and a table of F1 by code."""
    codes = sorted({code for one in (gold, found) for own in one.values() for code in own})
    counts = counts_of(gold, found, codes)
    sums = counts.sum(axis=1)
    low, high = intervals(counts, seed)
    facts = {"claims": len(gold), "codes": len(codes)}
    for name, *values in zip(MEASURES, measures_of(*sums), low, high):
        facts |= dict(zip((name, f"{name}_low", f"{name}_high"), values))
    by_code = pd.DataFrame(sums.T.astype(int), columns=["right", "named", "gold"])
    by_code.insert(0, "code", codes)
    return facts, by_code.assign(F1=f1_of(*sums))

# -------------------- Thresholds
def best_threshold(gold, probabilities):
    """Return the threshold with the best F1."""
    from sklearn.metrics import precision_recall_curve
    precision, recall, thresholds = precision_recall_curve(gold, probabilities)
    f1 = 2 * precision * recall / np.maximum(precision + recall, 1e-12)
    return float(thresholds[f1[:-1].argmax()])

def fit_thresholds(gold, probabilities):
    """Return a threshold for each code; rare ones share that of the best micro F1."""
    common = best_threshold(gold.ravel(), probabilities.ravel())
    return [best_threshold(*columns) if columns[0].sum() >= FEW else common
            for columns in zip(gold.T, probabilities.T)]
