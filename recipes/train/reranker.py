# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "accelerate==1.15.0", "datasets==5.2.0", "numpy==2.4.6", "pandas==3.1.1", "protobuf==7.36.2",
#   "scikit-learn==1.9.1", "sentence-transformers==6.2.0", "sentencepiece==0.2.3",
#   "torch==2.13.0", "tqdm==4.70.1", "transformers==5.23.0",
# ]
# ///
"""
Fine-tune a cross-encoder on mined examples.

Reads   examples of mine.py (pairs, tuples or scores), claims, corpus.jsonl; claims, qrels and a run
        of a dev split
Writes  models/reranker/
        OUT.parts/: checkpoints, from which the same call resumes
Prints  the last line is JSON: losses, and nDCG@10 on dev before training and after each epoch

Examples
    python recipes/train/mine.py && python recipes/train/reranker.py
    python recipes/train/reranker.py --loss bce --epochs 3 --lr 2e-4 --lora 16
    python 03_rerank.py --model work/demo/models/reranker
"""

import numpy as np
import training
from training import RERANK, kit

LISTS = ("lambda", "softmax")  # losses on a list of abstracts
COMPARING = ("margin", *LISTS)  # losses that compare a positive with negatives


def rows_of(example, claims, abstracts, loss):
    """Return the rows of an example, a pair with a target or a tuple, as the loss takes them.

    The losses of COMPARING take (claim, positive, negative), others (claim, abstract, target).
    """
    if "target" in example and loss not in COMPARING:
        abstract = abstracts[str(example["abstract_id"])]
        return [(claims[str(example["claim_id"])], abstract, float(example["target"]))]
    claim, positive, *negatives = training.tuple_of(example, claims, abstracts)
    if loss in COMPARING:
        return [(claim, positive, negative) for negative in negatives]
    return [(claim, positive, 1.0), *((claim, negative, 0.0) for negative in negatives)]


def lists_of(rows, loss):
    """Join rows (claim, positive, negative) to lists (claim, abstracts, targets).

    lambda: a list has all abstracts of a claim, with the targets 1 and 0. softmax: a list has one
    positive and its negatives; its targets are the logarithms of 1 and 0.
    """
    high, low = (0.0, -np.inf) if loss == "softmax" else (1.0, 0.0)
    lists = {}  # {(claim, positive), or (claim,): {abstract: target}}
    for claim, positive, negative in rows:
        shared = (claim, positive) if loss == "softmax" else (claim,)
        targets = lists.setdefault(shared, {})
        targets.setdefault(negative, low)  # it may be the positive of an earlier row
        targets[positive] = high
    return [(shared[0], list(targets), list(targets.values())) for shared, targets in lists.items()]


def loss_of(model, rows, args):
    """Return the loss on logits that --loss names; rows: those of training."""
    import torch
    from sentence_transformers.cross_encoder import losses

    if args.loss == "bce":
        weight = args.positive_weight
        if weight == "balanced":
            positives = sum(target for _, _, target in rows)
            weight = (len(rows) - positives) / max(positives, 1)
        # A weight of 1 is left out, as the product with it would move gradients in their last bit.
        return losses.BinaryCrossEntropyLoss(
            model, pos_weight=None if weight == 1 else torch.tensor(weight)
        )
    if args.loss == "lambda":
        return losses.LambdaLoss(model, k=args.cutoff)  # Wang et al. 2018
    if args.loss == "softmax":
        # ListNet (Cao et al. 2007) takes the softmax of targets, which are logarithms here.
        return losses.ListNetLoss(model)
    if args.loss == "l1":
        loss = losses.MSELoss(model, torch.nn.Sigmoid())
        loss.loss_fct = torch.nn.L1Loss()  # |sigmoid(s) - target| in place of its square
        return loss
    loss = losses.MarginMSELoss(model)
    # With targets of -1, it is max(0, margin - x), where x is s(positive) - s(negative).
    loss.loss_fct = torch.nn.HingeEmbeddingLoss(args.margin)
    return loss


def dev_evaluator(dev, abstracts, depth):
    """Return an evaluator of nDCG@10 over claims with evidence.

    Only candidates are ranked, so the ideal order is that of the evidence among them. A claim
    without evidence among its candidates counts 0.
    """
    from sentence_transformers.cross_encoder.evaluation import CrossEncoderRerankingEvaluator

    *judged, run_path = dev
    claims, _, evidence = kit.read_judged(*judged, abstracts)
    run = kit.read_table(run_path, kit.RUN, claim_id=claims, abstract_id=abstracts)
    candidates = run[run["rank"] <= depth].groupby("claim_id")["abstract_id"].agg(list)
    samples = []
    for claim_id, relevant in evidence.items():
        found = candidates.get(claim_id, [])
        documents = [abstracts[abstract_id] for abstract_id in found] or [""]  # it wants one
        positive = [abstracts[abstract_id] for abstract_id in relevant.intersection(found)]
        if len(documents) == 1:  # scikit-learn has no nDCG of one; of it twice, it is the same
            documents *= 2
        samples.append({"query": claims[claim_id], "positive": positive, "documents": documents})
    return CrossEncoderRerankingEvaluator(samples, name="dev", always_rerank_positives=False)


def load_to_train(name, **options):
    """Load a reranker, or an encoder or language model that gets a new head."""
    from sentence_transformers import CrossEncoder

    kind = RERANK.kind_of(name)
    model = RERANK.known_reranker(name, kind, **options)
    if not model and "CausalLM" in kind:
        # CrossEncoder gives a CausalLM no head, but compares two next tokens; another name of the
        # architecture makes it add one.
        options |= {"num_labels": 1, "config_kwargs": {"architectures": ["Classification"]}}
    return model or CrossEncoder(name, **options)


def train(args):
    """Fine-tune a cross-encoder on mined examples."""
    dev = training.dev_files(args, args.dev_run or f"{args.work}/{args.dev_split}/hybrid.tsv")
    task = training.begin(args, *dev)
    claims = kit.read_claims(args.claims)
    abstracts = RERANK.read_abstracts(args.corpus, args.fields)
    found = training.read_examples(args.examples, rows_of, claims, abstracts, args.loss)
    rows = list(dict.fromkeys(found))  # each once
    columns = ["claim", "abstract", "label"]
    if args.loss in LISTS:
        rows = lists_of(rows, args.loss)
    if args.loss == "margin":
        rows = [(*row, -1.0) for row in rows]  # targets, as in loss_of()
        columns.insert(1, "positive")
    model = RERANK.open_reranker(args, load_to_train)
    with RERANK.parts_of(args.out, task) as parts:
        summary = training.fine_tune(
            parts,
            args,
            model,
            data=dict(zip(columns, zip(*rows))),
            loss=loss_of(model, rows, args),
            evaluator=dev_evaluator(dev, abstracts, args.dev_depth) if dev else None,
            measure="dev_ndcg@10",
            prompts=model.prompts.get(model.default_prompt_name),
        )
        return training.save_model(model, task, summary, args)


def weight(text):
    """Return a weight above 0, or balanced."""
    return text if text == "balanced" else kit.positive(text)


# fmt: off
def add_train(add):
    add("examples", nargs="?", default="{work}/{split}/examples.jsonl",
        help="train on these examples of mine.py: pairs, tuples or scores")
    kit.add_pairs(add)
    add("--prompt", metavar="TEXT", help="""instruct a causal reranker or monoT5 by this text; it is
        the text itself, no file as in 04_llm_rerank.py (default: the model's own)""")
    add("--loss", choices=("bce", "l1", *COMPARING), default="bce", help="""bce: binary
        cross-entropy; l1: distance of the sigmoid from the target; margin: hinge loss on tuples;
        lambda: LambdaLoss on all abstracts of a claim; softmax: cross-entropy of a positive among
        its negatives""")
    add("--positive-weight", type=weight, default=1.0, help="""bce: count a positive this many
        times; balanced: as many times as there are negatives per positive""")
    add("--cutoff", type=kit.count,
        help="lambda: optimise nDCG at this rank (default: at all ranks)")
    add("--margin", type=float, default=0.2, help="""margin: the score of a positive should
        exceed that of a negative by this much""")
    add("--dev-run", help="rerank this run of dev claims (default: hybrid.tsv)")
    add("--dev-depth", type=kit.count, default=20, help="rerank this many candidates per dev claim")
    # weight_decay: Kiepura & Lam 2025
    training.add_training(
        add, "reranker", epochs=3, lr=2e-5, batch_size=16, weight_decay=0.01)
    training.add_dev(add)
# fmt: on


if __name__ == "__main__":
    kit.run(__doc__, train, add_train, split="train")
