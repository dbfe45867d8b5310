# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "accelerate==1.15.0", "datasets==5.2.0", "numpy==2.4.6", "pandas==3.1.1", "protobuf==7.36.2",
#   "scikit-learn==1.9.1", "sentence-transformers==6.2.0", "sentencepiece==0.2.3",
#   "torch==2.13.0", "tqdm==4.70.1", "transformers==5.23.0",
# ]
# ///
"""
Fine-tune an encoder, a reranker or an NLI model to label pairs of claim and abstract.

Reads   qrels, claims, corpus.jsonl, examples of mine.py --shape labels; claims and qrels of a dev
        split
Writes  models/classifier/
        OUT.parts/: checkpoints, from which the same call resumes
Prints  the last line is JSON: F1 on held-out pairs, beside that of the majority label

Examples
    python recipes/train/classifier.py --model work/demo/models/reranker --epochs 3
    python 05_classify.py --model work/demo/models/classifier
"""

import contextlib
import functools
import re
from fractions import Fraction

import numpy as np
import training
from training import CLASSIFY, kit

calibrated = CLASSIFY.calibrated


# ---------- Pairs
def rows_of(example, claims, abstracts):
    """Return the row of a judged pair: its ids, its texts and the index of its label."""
    claim_id, abstract_id, label = [str(example[name]) for name in kit.QRELS]
    texts = (claims[claim_id], abstracts[abstract_id])
    return [(claim_id, abstract_id, *texts, kit.LABELS.index(label))]


def read_pairs(claims_path, qrels_path, abstracts, examples=None):
    """Return a table of judged pairs and examples; gold: the index of the label."""
    import pandas as pd

    claims, qrels, _ = kit.read_judged(claims_path, qrels_path, abstracts)
    rows = []
    for judgement in qrels.to_dict("records"):
        rows += rows_of(judgement, claims, abstracts)
    if examples:
        rows += training.read_examples(examples, rows_of, claims, abstracts)
    table = pd.DataFrame(rows, columns=[*kit.PAIR, "claim", "abstract", "gold"])
    return table.drop_duplicates(kit.PAIR)  # a judgement counts before an example


def hold_out(table, args):
    """Split a table into pairs to train on and held-out pairs, stratified by label.

    With --split-by claim, the pairs of a claim stay together. --held-out 0.4 is two of five parts.
    """
    from sklearn.model_selection import StratifiedGroupKFold, StratifiedKFold

    part = Fraction(args.held_out).limit_denominator(20)
    splitter = StratifiedKFold
    groups = None
    if args.split_by == "claim":
        splitter = StratifiedGroupKFold
        groups = table["claim_id"]
    is_held_out = np.zeros(len(table), bool)
    with contextlib.suppress(ValueError):  # scikit-learn: fewer pairs than folds, or one fold
        folds = splitter(part.denominator, shuffle=True, random_state=args.seed)
        # Ties depend on the order of the labels: minus makes it that of the alphabet.
        for _, rows in list(folds.split(table, -table["gold"], groups))[: part.numerator]:
            is_held_out[rows] = True
    if part and not 0 < is_held_out.sum() < len(table):
        kit.warn("--held-out", "too few pairs or claims for this share, so the last epoch is kept")
        is_held_out[:] = False
    return table[~is_held_out], table[is_held_out]


# ---------- Classes of different sizes
def class_weights(counts):
    """Return inverse class frequencies (3,) that sum to 3; 0 for a class without pairs."""
    inverse = (counts > 0) / np.maximum(counts, 1)
    return 3 * inverse / inverse.sum()


def loss_weights(counts, args):
    """Return the weights of the classes in the loss (3,), the alphas of the focal loss.

    With focal, either the sampler or the loss makes up for rare classes. weighted-focal with the
    balanced sampler does it twice, as Kiepura & Lam 2025. cross-entropy has no weights.
    """
    sampler_balances = args.loss == "focal" and args.sampler == "balanced"
    if args.loss == "cross-entropy" or sampler_balances:
        return np.ones(3)
    return class_weights(counts)


def seen_shares(counts, args):
    """Return the class shares that training sees (3,): pairs drawn, times their loss weights."""
    draws = np.minimum(counts, 1) if args.sampler == "balanced" else counts
    seen = draws * loss_weights(counts, args)
    return seen / seen.sum()


def focal(logits, labels, weights):
    """Return the mean of -alpha_y (1 - p_y)^2 log p_y (Kiepura & Lam 2025, eq. 6)."""
    log_p = logits.float().log_softmax(dim=1).gather(1, labels[:, None])[:, 0]
    return (-weights[labels] * (1 - log_p.exp()) ** 2.0 * log_p).mean()


def loss_of(model, counts, args):
    """Return the loss that --loss names; counts: pairs of each output of the model (3,)."""
    import torch
    from sentence_transformers.cross_encoder import losses

    loss = losses.CrossEntropyLoss(model)
    if args.loss != "cross-entropy":
        weights = torch.tensor(loss_weights(counts, args)).float().to(model.device)
        # The library's loss computes logits and calls ce_loss(logits, labels), which is a module.
        loss.ce_loss.forward = functools.partial(focal, weights=weights)
    return loss


def balanced_batches(dataset, seed, generator, batch_size, **options):
    """Return a sampler of batches in which classes are equally frequent, drawn anew each epoch.

    The trainer calls it, as any batch sampler that is given as a function.
    """
    from sentence_transformers.base.sampler import DefaultBatchSampler
    from torch.utils.data import WeightedRandomSampler

    labels = np.array(dataset["label"])
    weights = class_weights(np.bincount(labels, minlength=3))[labels]
    rows = WeightedRandomSampler(weights, len(labels), generator=generator)
    # The trainer calls set_epoch() before each epoch; seeded there, a resumed training draws the
    # same rows.
    rows.set_epoch = lambda epoch: generator.manual_seed(seed + epoch)
    return DefaultBatchSampler(rows, batch_size=batch_size, **options)


# ---------- Model
def with_head(name, **options):
    """Return a CrossEncoder with its own head if that has the three labels, else with a new one."""
    from sentence_transformers import CrossEncoder
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    is_new = not CLASSIFY.head_order(config) or "ForSequence" not in str(config.architectures)
    if is_new:
        print(f"{name}: a new classification head is trained")
        # If the config names the architecture of a language model, CrossEncoder adds no head, but
        # compares the logits of yes and no as next tokens. So another name takes its place.
        options["config_kwargs"] = {
            "id2label": dict(enumerate(kit.LABELS)),
            "architectures": ["Classification"],
        }
        options["num_labels"] = 3
        options["model_kwargs"]["ignore_mismatched_sizes"] = True
    model = CrossEncoder(name, **options)
    if model.num_labels != 3:
        kit.fail(
            name,
            "its modules.json has a head of its own; name the encoder that it was trained from",
        )
    if is_new:
        model.config.stance_claim_first = True
    return model


def freeze(network, what):
    """Keep parts of a network from being trained.

    what: "encoder", all but pooler and head; a number: the embeddings and that many layers, from
    the first one; or None: nothing.
    """
    for name, weight in network.base_model.named_parameters():
        layer = re.search(r"\blayers?\.(\d+)\.", name)
        if what == "encoder":
            weight.requires_grad = "pooler" in name
        elif what and ("embed" in name or (layer and int(layer[1]) < what)):
            weight.requires_grad = False


# ---------- Training
def assess(logits, gold, out):
    """Return F1 on held-out pairs beside that of the majority label, and a fitted temperature."""
    from scipy.optimize import minimize_scalar
    from sklearn.metrics import f1_score, log_loss

    f1 = f1_score(gold, logits.argmax(axis=1), average="weighted")
    majority = f1_score(gold, np.full(len(gold), np.bincount(gold).argmax()), average="weighted")
    if f1 <= majority:
        kit.warn(out, "no better than the majority label; train longer, or start from an NLI model")
    log_t = 0.0
    if len(gold) >= 30:  # fewer cannot tell
        log_t = minimize_scalar(
            lambda log_t: log_loss(gold, calibrated(logits, np.exp(log_t)), labels=range(3)),
            bounds=np.log((0.05, 20)),
        ).x
    return {
        "held_out": len(gold),
        "held_out_F1": f1,
        "majority_F1": majority,
        "temperature": float(np.exp(log_t)),
    }


def train(args):
    """Fine-tune an encoder, a reranker or an NLI model on judged pairs."""
    if args.lora and args.freeze:
        kit.fail("--freeze", "--lora trains adapters in all layers; give one of the two")
    dev = training.dev_files(args)
    task = training.begin(args, *dev)
    from sentence_transformers.cross_encoder.evaluation import CrossEncoderClassificationEvaluator

    abstracts = CLASSIFY.read_abstracts(args.corpus, args.fields)
    table = read_pairs(args.claims, args.qrels, abstracts, args.examples)
    if dev:
        held_out = read_pairs(*dev, abstracts)
    else:
        table, held_out = hold_out(table, args)
    counts = np.bincount(table["gold"], minlength=3)
    if 0 in counts:
        kit.warn(args.qrels, f"training pairs of {kit.LABELS}: {counts}; see --examples")
    model = CLASSIFY.open_model(with_head, args.model, args)
    freeze(model.model, args.freeze)
    CLASSIFY.set_reader(model, args, batch_size=32)  # of held-out pairs
    order = np.array(CLASSIFY.head_order(model.config))  # places of the labels among the outputs
    labels = order[table["gold"]]
    pairs = list(zip(held_out["claim"], held_out["abstract"]))
    evaluator = CrossEncoderClassificationEvaluator(pairs, order[held_out["gold"]], name="held_out")
    with CLASSIFY.parts_of(args.out, task) as parts:
        summary = training.fine_tune(
            parts,
            args,
            model,
            data={"claim": table["claim"], "abstract": table["abstract"], "label": labels},
            loss=loss_of(model, np.bincount(labels, minlength=3), args),
            evaluator=evaluator if pairs else None,
            measure="held_out_f1_weighted",
            # "batch_sampler" is the library's name of its default
            batch_sampler=balanced_batches if args.sampler == "balanced" else "batch_sampler",
        )
        if pairs:
            logits = CLASSIFY.outputs_of(model, pairs)[0][:, order]
            summary |= assess(logits, held_out["gold"], args.out)
        model.config.stance_shares = seen_shares(counts, args).tolist()
        model.config.stance_temperature = summary.get("temperature", 1.0)
        return training.save_model(model, task, summary, args)


def frozen_part(text):
    """Return encoder as it is, else a number of layers."""
    return text if text == "encoder" else kit.count(text)


# fmt: off
def add_train(add):
    kit.add_qrels(add)
    add("--examples", help="""train on the examples in this file, too, such as NEI pairs of mine.py
        --shape labels""")
    kit.add_pairs(add)
    add("--freeze", type=frozen_part, help="""do not train the encoder, or its embeddings and this
        many layers (default: train all of it)""")
    add("--loss", choices=("focal", "weighted-focal", "cross-entropy"), default="focal",
        help="""cross-entropy; focal: focal loss (gamma 2), with class weights unless --sampler
        balances; weighted-focal: with class weights in any case, as Kiepura & Lam 2025""")
    add("--sampler", choices=("balanced", "shuffle"), default="balanced",
        help="draw pairs of all classes equally often, or each pair once per epoch")
    add("--held-out", type=kit.share, default=0.1, help="""without --dev-split, hold this share of
        the pairs out of training, rounded to a fraction with a denominator of at most 20 (0: none);
        the epoch with the best F1 on them is kept, and they fit the temperature""")
    add("--split-by", choices=("claim", "instance"), default="claim",
        help="keep the pairs of a claim together, or split single pairs")
    training.add_training(
        add, "classifier", epochs=10, lr=5e-5, batch_size=32, schedule="constant")
    training.add_dev(add, split=None, patience=3)
# fmt: on


if __name__ == "__main__":
    kit.run(__doc__, train, add_train, split="train")
