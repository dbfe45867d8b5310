"""
Measure 03_rerank.py's scoring beside CrossEncoder.predict called claim by claim at its defaults, as published code does.

Reads   nothing; makes abstracts of ClimateCheck's lengths and a cross-encoder of MiniLM-L6's size with random weights
        (on a GPU: of XLM-R-large's size, 560M parameters, bf16)
Prints  pairs per second, the ratio, the largest difference of scores in fp32; one line of JSON, last on stdout

Examples
    python tests/benchmarks/bench_rerank.py
    python tests/benchmarks/bench_rerank.py --claims 30 --depth 20
"""
import argparse
import json
import runpy
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
MINI = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096,
         "vocab_size": 250_002, "max_position_embeddings": 514}
PEAK = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L4": 121e12, "T4": 65e12}  # bf16 (T4: fp16), dense, per second

def script(path):
    """The names of a script."""
    sys.argv = [Path(path).name]
    return runpy.run_path(str(path))

def make_model(folder, sizes):
    """A cross-encoder with one logit, random weights and MiniLM's tokenizer."""
    import torch
    from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

    torch.manual_seed(13)
    BertForSequenceClassification(BertConfig(num_labels=1, **sizes)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(ROOT / "data/models/minilm").save_pretrained(folder)
    return folder

def make_pairs(claims, depth):
    """[(claim, abstract)], claim by claim; English words that the tokenizer knows, lengths as published."""
    corpus, rng = script(HERE / "make_corpus.py"), np.random.default_rng(13)
    words = np.array((ROOT / "README.md").read_text(encoding="utf-8").split(), dtype=object)
    lengths = iter(corpus["lengths_of"](rng, claims * depth))
    return [(" ".join(rng.choice(words, 15)), [" ".join(rng.choice(words, next(lengths))) for _ in range(depth)])
            for _ in range(claims)]

def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--claims", type=int, default=30)
    parser.add_argument("--depth", type=int, default=100)
    args = parser.parse_args()
    import torch
    from sentence_transformers import CrossEncoder

    cuda = torch.cuda.is_available()
    names, given = script(ROOT / "03_rerank.py"), make_pairs(args.claims, args.depth)
    pairs = [(claim, text) for claim, texts in given for text in texts]
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder), LARGE if cuda else MINI)
        how = SimpleNamespace(seed=13, device="auto", dtype="auto", max_length=512, batch_tokens=0, verifier=None)
        score = names["open_scoring"](model, how)
        score(pairs[:64], lambda rows: None)  # warms up
        begun = time.monotonic()
        found = score(pairs, lambda rows: None)
        ours = time.monotonic() - begun
        dtype = names["numbers_of"]("auto", "cuda" if cuda else "cpu")
        theirs_model = CrossEncoder(str(model), max_length=512, model_kwargs={"dtype": dtype})
        theirs_model.predict(pairs[:64])
        begun = time.monotonic()
        predicted = [theirs_model.predict([(claim, text) for text in texts], activation_fn=torch.nn.Identity())
                     for claim, texts in given]
        theirs = time.monotonic() - begun
    result = {"pairs": len(pairs), "ours_pairs_per_second": len(pairs) / ours,
              "theirs_pairs_per_second": len(pairs) / theirs, "ratio": theirs / ours,
              "largest_difference": float(np.abs(found - np.concatenate(predicted)).max())}
    if cuda:
        tokens = sum(len(theirs_model.tokenizer(*pair, truncation=True, max_length=512)["input_ids"]) for pair in pairs)
        weights = sum(p.numel() for name, p in theirs_model.named_parameters() if "embeddings" not in name)
        for name, peak in PEAK.items():
            if name in torch.cuda.get_device_name():
                result["share_of_peak"] = 2 * weights * tokens / ours / peak
    print(f"{len(pairs)} pairs: {result['ratio']:.2f} times the pairs per second of predict() claim by claim; "
          f"scores differ by {result['largest_difference']:.1e} at most")
    print(json.dumps(result))

if __name__ == "__main__":
    main()
