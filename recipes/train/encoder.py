# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "accelerate==1.15.0", "datasets==5.2.0", "numpy==2.4.6", "pandas==3.1.1",
#   "sentence-transformers==6.2.0", "torch==2.13.0", "tqdm==4.70.1", "transformers==5.23.0",
# ]
# ///
"""
Fine-tune the dense encoder on mined examples.

Reads   examples of mine.py --shape tuples, claims, corpus.jsonl; claims and qrels of a dev split
Writes  models/encoder/
        OUT.parts/: checkpoints, from which the same call resumes
Prints  the last line is JSON: losses, and nDCG@10 on dev before training and after each epoch

Examples
    python recipes/train/mine.py --shape tuples && python recipes/train/encoder.py
    python recipes/train/encoder.py --loss triplet --epochs 3 --lr 5e-5
    python 01_index.py --indexes dense --dense-model work/demo/models/encoder
"""

import numpy as np
import training
from training import INDEX, kit

DEV_POOL = 1000  # abstracts, drawn at random, that are ranked beside the judged ones of dev claims


def rows_of(example, claims, abstracts, loss):
    """Return the rows of an example; triplet: (claim, positive, negative) for each negative."""
    row = training.tuple_of(example, claims, abstracts)
    if loss == "triplet":
        return [(*row[:2], negative) for negative in row[2:]]
    return [row]


def of_one_length(rows):
    """Cut longer rows, and leave shorter ones out; the length keeps the most negatives."""
    counts = np.array([len(row) - 2 for row in rows])
    kept = [number * (counts >= number).sum() for number in range(counts.max() + 1)]
    width = 2 + np.argmax(kept)
    return [row[:width] for row in rows if len(row) >= width]


def dev_evaluator(dev, abstracts, seed):
    """Return an evaluator of nDCG@10 in a small corpus: judged abstracts and DEV_POOL others."""
    from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator

    claims, qrels, evidence = kit.read_judged(*dev, abstracts)
    drawn = np.random.default_rng(seed).permutation(list(abstracts))[:DEV_POOL]
    pool = {*drawn, *qrels["abstract_id"]}
    corpus = {key: abstracts[key] for key in abstracts if key in pool}
    return InformationRetrievalEvaluator(claims, corpus, evidence, name="dev")


def train(args):
    """Fine-tune the dense encoder on mined examples."""
    dev = training.dev_files(args)
    task = training.begin(args, *dev)
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import losses

    claims = kit.read_claims(args.claims)
    abstracts = INDEX.read_abstracts(args.corpus, args.fields, args.separator or " ")
    found = training.read_examples(args.examples, rows_of, claims, abstracts, args.loss)
    rows = of_one_length(found)
    encoder = INDEX.open_dense_encoder(args.model, args)
    encoder.similarity_fn_name = "cosine"  # of the dev evaluation
    if args.loss == "mnrl":
        loss = losses.MultipleNegativesRankingLoss(encoder, args.scale)
    else:  # max(0, cos(q, d-) - cos(q, d+) + margin)
        loss = losses.TripletLoss(encoder, losses.TripletDistanceMetric.COSINE, args.margin)
    columns = ["claim", "positive", *map(str, range(len(rows[0]) - 2))]  # 0, 1, ...: negatives
    prompts = dict.fromkeys(columns, encoder.prompts["document"])
    prompts["claim"] = encoder.prompts["query"]
    with INDEX.parts_of(args.out, task) as parts:
        summary = training.fine_tune(
            parts,
            args,
            encoder,
            data=dict(zip(columns, zip(*rows))),
            loss=loss,
            evaluator=dev_evaluator(dev, abstracts, args.seed) if dev else None,
            measure="dev_cosine_ndcg@10",
            prompts=prompts,
            batch_sampler="no_duplicates" if args.loss == "mnrl" else "batch_sampler",
        )
        summary["left_out"] = len(found) - len(rows)  # with mnrl, too few negatives
        # The encoder truncates at --max-length and may read windows. What is saved has the length
        # and the pooling of --model, so the new weights move to a fresh copy of that.
        trained = INDEX.open_model(SentenceTransformer, args.model, args, prompts=encoder.prompts)
        trained.load_state_dict(encoder.state_dict())
        trained.similarity_fn_name = "cosine"  # of the losses; 02_retrieve.py ranks by it
        return training.save_model(trained, task, summary, args)


# fmt: off
def add_train(add):
    add("examples", nargs="?", default="{work}/{split}/examples.jsonl",
        help="train on these examples of mine.py --shape tuples")
    kit.add_claims(add)
    INDEX.add_abstracts(add)
    add("--loss", choices=("triplet", "mnrl"), default="mnrl", help="""mnrl: in-batch negatives
        (more of them in larger batches), and the same number of mined ones in every row;
        triplet: one row for each mined negative""")
    add("--margin", type=float, default=0.3, help="""triplet: the cosine of the positive should
        exceed that of the negative by this much""")
    add("--scale", type=float, default=20, help="mnrl: multiply the cosines by this number")
    # warmup: AIRwaves 2025, Kiepura & Lam 2025
    training.add_training(add, "encoder", epochs=2, lr=7e-6, batch_size=64, warmup=0.1)
    training.add_dev(add)
# fmt: on


if __name__ == "__main__":
    kit.run(__doc__, train, add_train, split="train")
