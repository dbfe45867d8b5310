"""
Rerank the candidates of a run with cross-encoders, or train one.

Reads   work/NAME/SPLIT/hybrid.tsv (02_retrieve.py), data/NAME/claims.SPLIT.tsv, data/NAME/corpus.jsonl
        --graph: index/graph/ (01_index.py graph); --verifier: a classifier (05_classify.py train)
        train: also data/NAME/qrels.SPLIT.tsv
Writes  work/NAME/SPLIT/rerank.tsv: claim_id, abstract_id, rank (from 1), score
        Several models write rerank.1.tsv, rerank.2.tsv, ..., too; rerank.tsv is their reciprocal rank fusion.
        train: work/NAME/models/reranker/, and reranker.examples.jsonl, all that it was trained on (after --warm-start)
        What was scored before a crash stays in FILE.parts/ and is not scored again.
Prints  one line of JSON, last on stdout

Examples
    python 02_retrieve.py --split train && python 03_rerank.py train
    python 03_rerank.py --depth 50 --first-stage 0.5
    python 03_rerank.py --model cross-encoder/ms-marco-MiniLM-L-6-v2 BAAI/bge-reranker-v2-m3 --depth 200 --top-k 20
    python 03_rerank.py --depth 30 --graph work/demo/index/graph --top-k 10
    python 03_rerank.py --model castorini/monot5-base-msmarco --verifier work/demo/models/classifier --alpha 0.5
    python 03_rerank.py train --recipe margin --run work/demo/train/bm25.tsv --margin 0.25 --batch-size 8
"""
import argparse
import contextlib
import hashlib
import json
import os
import resource
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

RRF_K = 60                        # Cormack et al. 2009
GROUP = 1024                      # pairs, in whole claims, between two points to restart from
PADDING = 0.05                    # largest share of a batch that may be padding
TOKENS = {"cpu": 2_048, "cuda": 32_768}  # tokens a batch
ROUNDS, NEIGHBOURS, BEAM = 20, 10, 30    # AlexUNLP-FMT 2025
ALPHA = 0.5                       # +VeriRel 2025, eq. 5
MONO_T5 = ("Query: ", " Document: ", " Relevant:")  # Nogueira et al. 2020: the model answers true or false
MARGIN, FROM_TOP = 0.2, 500       # Ant Bridge 2025: hard negatives are drawn from the reranked top 500
SWEEP = [(8, 0.2, 0), (8, 0.25, 0), (16, 0.2, 0), (16, 0.25, 0), (16, 0.2, -1)]  # batch, margin, which --model; the same
WARM = {"lr": 1e-4, "scale": 10, "middle": 0.45}  # warm start: towards scale x (cosine - middle)
WEIGHT_DECAY = 0.01               # Kiepura & Lam 2025, section 4.1
RECIPES = {  # what a recipe is trained with where no flag says otherwise
    "two-phase": {"epochs": [3, 2], "lr": 2e-5, "batch_size": 16, "depth": 200, "hard": 4, "easy": 4, "pool": "both"},
    "pointwise": {"epochs": [3], "lr": 2e-5, "batch_size": 16, "depth": 20, "hard": 8, "easy": 0, "pool": "both"},
    "margin": {"epochs": [1], "lr": 2e-5, "batch_size": 16, "depth": 1000, "hard": 5, "easy": 10, "pool": "both"},
    "distil": {"epochs": [10], "lr": 1e-5, "batch_size": 64, "depth": 20, "hard": 0, "easy": 0, "pool": "both"},
}  # Kiepura & Lam, AIRwaves, Ant Bridge (who do not give epochs and lr), +VeriRel

# --- helpers: the same block in all six scripts
LABELS, START = ("SUPPORTS", "REFUTES", "NEI"), time.monotonic()
SPELT = {name: LABELS[place] for place, names in enumerate((  # by the data sets in use
    "SUPPORT SUPPORTED ENTAILMENT", "REFUTE REFUTED CONTRADICT CONTRADICTION", "NOT_ENOUGH_INFORMATION NOT_ENOUGH_INFO "
    "NOTENOUGHINFO NEUTRAL")) for name in names.split()}
PACKAGES = "numpy pandas torch transformers sentence_transformers bm25s openai".split()
TREC = {6: "claim_id q0 abstract_id rank score tag".split(), 4: "claim_id q0 abstract_id label".split()}
if not sys.stderr.isatty():  # every tqdm obeys these: plain lines where no bar can be drawn
    os.environ.setdefault("TQDM_MININTERVAL", "10")
    os.environ.setdefault("TQDM_BAR_FORMAT", "{desc}: {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}]\n")

def fail(where, what):
    """Bad input or usage: one line on stderr, exit status 2."""
    sys.exit(print("error:", *f"{where}: {what}".split(), file=sys.stderr) or 2)

def reject(path, table, bad, what):
    """Fail at the first row where bad (boolean, by row) holds; what may name the row's {columns}."""
    if bad.any():  # the index counts records: line breaks inside quoted fields come on top
        breaks = table.loc[: bad.idxmax()].iloc[:-1].apply(lambda column: column.str.count("\n")).to_numpy().sum()
        fail(f"{path}:{bad.idxmax() + int(breaks)}", what.format(**table.loc[bad.idxmax()]))

def read_table(path, columns, **known):
    """TSV with a header, or TREC, as strings; a run comes by claim and rank. known: the ids that a column may hold."""
    import pandas as pd
    try:
        with open(path, encoding="utf-8-sig") as file:
            words = file.readline().split()
        trec = set(columns) <= set(TREC.get(len(words), ())) and not set(columns) & set(words)
        shape = dict(sep=r"\s+", header=None, names=TREC[len(words)]) if trec else dict(sep="\t")
        table = pd.read_csv(path, dtype=str, na_filter=False, skip_blank_lines=False, encoding="utf-8-sig", **shape)
    except (OSError, ValueError) as error:
        fail(path, f"{getattr(error, 'strerror', None) or error}; give a table with the columns {', '.join(columns)}")
    if not isinstance(table.index, pd.RangeIndex):
        fail(f"{path}:1", "the rows have more fields than the header; mend the header")
    table.index += 1 if trec else 2
    return check_table(path, table, columns, trec, **known)

def check_table(path, table, columns, trec=False, **known):
    """What read_table refuses and mends; table is indexed by line."""
    import pandas as pd
    if not set(columns) <= set(table):
        found = ", ".join(map(str, table))
        fail(f"{path}:1", f"the columns {', '.join(columns)} are wanted, {found} found; mend the header")
    table = table[(table != "").any(axis=1)].copy()
    ids = [column for column in columns if column.endswith("_id")]
    reject(path, table, (table[ids] == "").any(axis=1), "an id is empty; fill it in or remove the row")
    reject(path, table, table.duplicated(ids), " ".join(f"{c} {{{c}}}" for c in ids) + " stands twice; keep one row")
    for column, allowed in known.items():
        reject(path, table, ~table[column].isin(allowed), f"unknown {column} {{{column}}}; give the files that go together")
    if "label" in columns and trec:  # TREC judges relevance: no stance to be had
        table["label"] = np.where(pd.to_numeric(table["label"], errors="coerce") > 0, "RELEVANT", "NEI")
    elif "label" in columns:
        table["label"] = table["label"].str.upper().str.replace(" ", "_").replace(SPELT)
        reject(path, table, ~table["label"].isin(LABELS), f"label {{label!r}} is none of {', '.join(LABELS)}; map it")
    if "rank" not in columns:
        return table
    rank, score = (pd.to_numeric(table[c], errors="coerce").astype(float) for c in ("rank", "score"))
    reject(path, table, ~np.isfinite(score), "score {score!r} is not a finite number; repair the row")
    if trec:  # as trec_eval does: by score, whatever the rank column says
        rank = score.groupby(table["claim_id"]).rank(method="first", ascending=False)
    reject(path, table, ~(rank >= 1) | (rank % 1 != 0), "rank {rank!r} is not an integer from 1; number the rows anew")
    run = table.assign(rank=rank.astype(int), score=score, order=table["claim_id"].factorize()[0])
    run = run.sort_values(["order", "rank"])
    gap = run["rank"] != run.groupby("order").cumcount() + 1
    reject(path, table, gap.sort_index(), "the ranks of claim {claim_id} have a gap or a tie here; number the rows anew")
    return run.drop(columns="order").reset_index(drop=True)

def read_corpus(path):
    """{abstract_id: record} in file order; an abstract that is no text becomes "", counted in one warning."""
    corpus, empty = {}, 0
    if Path(path).is_dir():
        fail(path, "a folder; name the JSONL file in it")
    for number, line in enumerate(open(path, "rb"), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            if rb"\ud" in line.lower():  # half a character, as in JSON that was cut off somewhere, becomes a question mark
                record = json.loads(json.dumps(record, ensure_ascii=False).encode("utf-8", "replace"))
            name = str(record["abstract_id"]) if type(record["abstract_id"]) in (str, int) else ""
        except (ValueError, KeyError, TypeError, RecursionError):
            fail(f"{path}:{number}", "no JSON object with an abstract_id; write one object a line")
        if not name or name in corpus:
            fail(f"{path}:{number}", f"abstract_id {name!r} is empty or stands twice; give every record its own string")
        text = record.get("abstract")
        empty += not (isinstance(text, str) and text.strip())
        corpus[name] = record | {"abstract": text if isinstance(text, str) else ""}
    if empty:
        print(f"warning: {path}: {empty} abstracts are null, empty or no text; kept as empty", file=sys.stderr)
    return corpus

def fingerprints(*paths):
    """{path: sha256} of this script, of files, and of folders (of their meta.json, else of all files inside)."""
    prints = {}
    for path in map(Path, (sys.argv[0], *paths)):
        files = [path / "meta.json"] if (path / "meta.json").is_file() else sorted(path.rglob("*")) or [path]
        digests = [hashlib.file_digest(f.open("rb"), "sha256").hexdigest() for f in files if f.is_file()]
        if not digests:
            fail(path, "no such file or folder; make it with the script before this one, or name another")
        prints[path.as_posix()] = digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()
    return prints

def up_to_date(paths, args, inputs):
    """True, and said, if all paths stand with a provenance that names these arguments and inputs."""
    same, read = not args.force, {Path(path).resolve() for path in inputs}
    for path in map(Path, paths):
        made = {}
        with contextlib.suppress(OSError, ValueError):
            made = json.loads(Path(f"{path}.meta.json").read_text(encoding="utf-8"))
        known = made.get("arguments", {})
        theirs = path.is_dir() and any(path.iterdir()) and known.get("job") != args.job  # it would be replaced whole
        if theirs or any(map(Path.is_file, path.parents)):
            fail(path, "a folder or file stands there that this command did not make; give another --out, or move it")
        if path.resolve() in read:
            fail(path, "this command reads it, and would write over it; give another --out")
        same &= path.exists() and known == vars(args) | {"force": False} and made.get("inputs") == inputs
    return same and not print(*(f"up to date: {path}" for path in paths), sep="\n")

def remove(*paths):
    """Delete files and folders, those that are there."""
    for path in map(Path, paths):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)

@contextlib.contextmanager
def written(path, args, inputs, **facts):
    """Yield a temporary path; the file or folder made there becomes path, whole, with its provenance beside it."""
    path, temporary, meta = Path(path), Path(f"{path}.tmp-{os.getpid()}"), Path(f"{path}.meta.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob(f"{path.name}.tmp-[0-9]*"):  # what a killed process left behind
        try:
            os.kill(int(left.name.split(".tmp-")[-1].split(".")[0]), 0)
        except ProcessLookupError:
            remove(left)
        except (OSError, ValueError):  # someone else's, alive; or no process number
            pass
    try:
        yield temporary
        packages = {name: sys.modules[name].__version__ for name in PACKAGES if name in sys.modules}
        arguments = vars(args) | {"force": False}
        made = dict(command=sys.argv, arguments=arguments, inputs=inputs, packages=packages, **facts, **spent())
        provenance = Path(f"{temporary}.meta.json")
        provenance.write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        for file in filter(Path.is_file, (provenance, temporary, *temporary.rglob("*"))):
            with open(file, "rb") as handle:
                os.fsync(handle.fileno())
        if path.is_dir():
            os.replace(path, f"{temporary}.old")
        if temporary.is_dir():  # first the provenance, which vouches for nothing as long as there is no folder
            os.replace(provenance, meta)
        else:
            meta.unlink(missing_ok=True)  # from here on it would vouch for the new bytes
        os.replace(temporary, path)
        if provenance.exists():
            os.replace(provenance, meta)
        remove(f"{temporary}.old")
    finally:
        remove(temporary, f"{temporary}.meta.json")

def spent():
    """Seconds and peak memory (MiB) of this process so far."""
    unit = 1024 if sys.platform == "linux" else 1024**2
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // unit
    return {"seconds": round(time.monotonic() - START, 1), "peak_mib": peak}

class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """The docstring as it stands, and the defaults."""
    def _get_help_string(self, action):
        return super()._get_help_string(action) if action.default else action.help

def at_least(least):
    """For argparse: a whole number from least on."""
    def whole(text):
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"{text} is below {least}")
        return int(text)
    return whole

def run_job(doc, jobs):
    """Run the job named by the first word (else the first of jobs); the last line of stdout is its JSON."""
    words = sys.argv[1:]
    job, flags = jobs[words.pop(0) if words and words[0] in jobs else next(iter(jobs))]
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS, description=doc, formatter_class=Help, allow_abbrev=False)
    parser.error = lambda message: fail(Path(sys.argv[0]).name, f"{message}; see --help")
    flags(parser.add_argument)
    parser.set_defaults(job=f"{Path(sys.argv[0]).name} {job.__name__}")
    parser.add_argument("--data", default="data/demo", help="folder of corpus, claims and qrels")
    parser.add_argument("--work", default="work/demo", help="folder of all that is made from them")
    parser.add_argument("--split", default="train" if job.__name__ == "train" else "test", help="which claims")
    parser.add_argument("--seed", type=int, default=13, help="of every random choice")
    parser.add_argument("--device", default="auto", help="cuda, cuda:1, mps, cpu; auto takes the best there is")
    parser.add_argument("--force", action="store_true", help="make outputs again that are up to date")
    args = parser.parse_args(words)
    for word in ("data", "work", "split"):
        for name, value in vars(args).items():
            texts = [text.replace(f"{{{word}}}", getattr(args, word)) if isinstance(text, str) else text
                     for text in (value if isinstance(value, list) else [value])]
            setattr(args, name, texts if isinstance(value, list) else texts[0])
    if getattr(args, "out", None):
        args.out = str(Path(args.out))  # without a slash at its end, behind which names would be put
    try:
        print(json.dumps(job(args) | spent(), ensure_ascii=False))
    except KeyboardInterrupt:
        sys.exit(130)
# --- end of helpers

# --- models: the same block in all scripts that load one
def model_folder(name):
    """The folder of a model: name itself, or the hub's snapshot of it (from the cache under HF_HUB_OFFLINE=1)."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download
    try:
        return Path(snapshot_download(name, ignore_patterns=["*.onnx*", "openvino/*", "*.h5", "*.msgpack", "*.pkl"]))
    except Exception as error:  # a dozen kinds: no network, no such model, no access, not in the cache
        fail(name, f"no such folder, and the hub does not give it ({type(error).__name__}); check the name, the network, "
             "and for a gated model its terms and HF_TOKEN; see data/download.py --help")

def device_of(name):
    """The torch device that --device names; auto takes the best there is."""
    import torch
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError, NotImplementedError):
        fail("--device", f"there is no {name} that torch could use here; take auto or cpu")
    return name

def precision_of(device):
    """fp32 on a CPU; on a GPU bf16, or fp16 where it would only be emulated."""
    import torch
    if not str(device).startswith("cuda"):
        return "fp32"
    return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"

@contextlib.contextmanager
def ticking(what):
    """While something without a progress bar goes on (imports, loading), say so every three seconds."""
    done = threading.Event()
    def tick(seconds=0):
        sys.stderr.write(f"{what} ... {seconds} s\n")  # in one piece: an error may be on its way at the same time
        done.wait(3) or tick(seconds + 3)
    threading.Thread(target=tick, daemon=True).start()
    try:
        yield
    finally:
        done.set()
# --- end of models

# --- batches and restarts: the same block in 01_index.py, 03_rerank.py and 05_classify.py
def workplace(folder, args, inputs):
    """A folder for what is made on the way; it is emptied when it was begun with other arguments or inputs."""
    task = json.dumps({"arguments": vars(args) | {"force": False}, "inputs": inputs}, sort_keys=True)
    with contextlib.suppress(OSError):
        if (folder / "task.json").read_text(encoding="utf-8") == task and not args.force:
            return folder
    remove(folder)
    folder.mkdir(parents=True)
    (folder / "task.json").write_text(task, encoding="utf-8")
    return folder

def one_gpu(args):
    """Show torch only the GPU that --device names: a Trainer would multiply its batches by the GPUs that it sees."""
    kind, _, place = args.device.partition(":")
    if kind in ("auto", "cuda") and (place or "0").isdigit():
        seen = os.environ.get("CUDA_VISIBLE_DEVICES")
        shown = {0: "0", int(place or 0): place or "0"} if seen is None else dict(enumerate(seen.split(",")))
        os.environ["CUDA_VISIBLE_DEVICES"], args.device = shown.get(int(place or 0), ""), kind

def last_checkpoint(folder):
    """The newest checkpoint that was written to its end (its state comes last), or None; torn ones are removed."""
    for path in sorted(folder.glob("checkpoint-*"), key=lambda path: -int(path.name.split("-")[1])):
        with contextlib.suppress(OSError, ValueError):
            json.loads((path / "trainer_state.json").read_text(encoding="utf-8"))
            return str(path)
        remove(path)
    return None

def resume(folder, how):
    """The checkpoint that training by the arguments how goes on from, or None; no epoch is begun where patience was over."""
    if checkpoint := last_checkpoint(folder):
        state = json.loads((Path(checkpoint) / "trainer_state.json").read_text(encoding="utf-8"))
        stopped = state["stateful_callbacks"]["TrainerControl"]["args"]["should_training_stop"]
        how.max_steps = state["global_step"] if stopped else how.max_steps
    return checkpoint

def batches(lengths, budget):
    """Rows by batch, longest texts first: at most budget tokens with padding, at most PADDING of them padding."""
    batch, tokens = [], 0
    for row in np.argsort(-lengths, kind="stable"):
        padded = (len(batch) + 1) * lengths[batch[0]] if batch else 0
        if batch and (padded > budget or tokens + lengths[row] < (1 - PADDING) * padded):
            yield batch
            batch, tokens = [], 0
        batch.append(row)
        tokens += lengths[row]
    if batch:
        yield batch
# --- end of batches and restarts

# ----------------------------------------------------------- Inputs
def text_of(record):
    """What the cross-encoder reads of an abstract: the title, where there is one, and the abstract."""
    return f"{record.get('title') or ''} {record['abstract']}".strip()

def read_inputs(args, path):
    """The run at path, {claim_id: claim} and {abstract_id: text}, all checked against each other."""
    claims = read_table(args.claims, ["claim_id", "claim"])
    texts = {name: text_of(record) for name, record in read_corpus(args.corpus).items()}
    run = read_table(path, ["claim_id", "abstract_id", "rank", "score"], claim_id=claims["claim_id"], abstract_id=texts)
    return run, dict(zip(claims["claim_id"], claims["claim"])), texts

def read_graph(folder, args, inputs):
    """{abstract_id: [its neighbours, nearest first]}, from an index of this corpus."""
    try:
        meta = json.loads((Path(folder) / "meta.json").read_text(encoding="utf-8"))
        ids = json.loads((Path(folder) / "abstract_ids.json").read_text(encoding="utf-8"))
        neighbours = np.load(Path(folder) / "neighbours.npy")
    except (OSError, ValueError):
        fail(folder, "no neighbour graph; build it with 01_index.py graph")
    if meta["corpus"] != inputs[Path(args.corpus).as_posix()]:
        fail(Path(folder) / "meta.json", f"this graph was built from another corpus than {args.corpus}; build it again")
    return {name: [ids[row] for row in rows] for name, rows in zip(ids, neighbours[:, : args.neighbours].tolist())}

# ----------------------------------------------------------- Scorers
# A scorer is (assemble, forward): assemble(pairs) -> token ids and the like, one dictionary a (claim, text) pair;
# forward(those of a batch) -> numbers (pairs, labels): a reranker's one logit, a verifier's three.
def check_head(model, labels, trained=True):
    """Refuse a folder whose head does not fit, before anything is made; without trained, a plain encoder will do."""
    try:
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        fail(model, "no config.json to be read there; give the folder or hub id of a model")
    head = any(str(name).endswith("ForSequenceClassification") for name in config.get("architectures") or [])
    found = len(config.get("id2label", (0, 1)))  # two labels are what a config leaves out
    if not head and trained and not config.get("is_encoder_decoder"):
        fail(model, "it is no cross-encoder, as it has no classification head; make one with: 03_rerank.py train")
    if head and found != labels:
        what = "a verifier has three" if labels > 1 else "a reranker has one; stance classifiers belong to --verifier"
        fail(model, f"it has {found} labels, {what}")
    return config

def load_scorer(model, args, labels=1):
    """A cross-encoder with so many labels, or a sequence-to-sequence reranker that answers true or false."""
    if check_head(model, labels).get("is_encoder_decoder"):
        return load_mono_t5(model, args)
    return cross_encoder_scorer(load_cross_encoder(model, args, dtype=args.dtype), args.max_length)

def numbers_of(dtype, device):
    """The torch dtype that --dtype stands for on a device."""
    import torch
    dtype = precision_of(device) if dtype == "auto" else dtype
    return {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[dtype]

def readable(model, length):
    """length, or as many tokens as the model has positions for, if these are fewer: it would crash on one more."""
    from torch.nn import Embedding
    for name, table in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(table, Embedding):
            unused = 0 if table.padding_idx is None else table.padding_idx + 1  # RoBERTa counts from behind its padding
            length = min(length, len(table.weight) - unused)
    return length

def load_cross_encoder(model, args, labels=None, dtype="fp32"):
    """A sequence-classification model; with labels given, a plain encoder gets a new head, drawn with the seed."""
    with ticking(f"loading {model}"):
        import transformers
        from sentence_transformers import CrossEncoder
        transformers.logging.set_verbosity_error()  # a new head is what train asks for: no warning needed
        transformers.set_seed(args.seed)
        device = device_of(args.device)
        encoder = CrossEncoder(str(model), num_labels=labels, max_length=args.max_length, device=device,
                               model_kwargs={"dtype": numbers_of(dtype, device)})
        encoder.max_seq_length = readable(encoder.model, args.max_length)
        return encoder

# --- the last layer: the same block in 03_rerank.py and 05_classify.py
@contextlib.contextmanager
def first_token_last(model):
    """Heads of BERT's kind read the first token only: in the last layer, what the others ask of attention and their
    feed-forward part are spared. The logits are the same; other kinds of models are left as they are."""
    from torch.nn.functional import scaled_dot_product_attention

    layers = getattr(getattr(model.base_model, "encoder", None), "layer", [None])
    attention, kind = getattr(layers[-1], "attention", None), model.config.model_type
    plain = kind in ("bert", "roberta", "xlm-roberta", "electra")
    if attention is None or not (plain or kind in ("deberta", "deberta-v2")):
        yield
        return

    def first_query(hidden, attention_mask=None, **_):
        parts = ((own.query, hidden[:, :1]), (own.key, hidden), (own.value, hidden))
        heads = [part(of).unflatten(-1, (-1, own.attention_head_size)).transpose(1, 2) for part, of in parts]
        mask = None if attention_mask is None else attention_mask[:, :, :1]
        return scaled_dot_product_attention(*heads, attn_mask=mask).transpose(1, 2).flatten(2), None

    own = attention.self
    hooks = [attention.register_forward_hook(lambda _, __, out: (out[0][:, :1], *out[1:]))]
    if plain and model.config._attn_implementation == "sdpa":
        own.forward = first_query
        hooks.append(attention.output.register_forward_pre_hook(lambda _, parts: (parts[0], parts[1][:, :1])))
    try:
        yield
    finally:
        own.__dict__.pop("forward", None)
        for hook in hooks:
            hook.remove()
# --- end of the last layer

def cross_encoder_scorer(encoder, max_length):
    """A claim is tokenised once, however many pairs it stands in; of claim and abstract, the longer one is cut."""
    from sentence_transformers.util import batch_to_device
    tokenizer, known, limit = encoder.tokenizer, {}, min(max_length, encoder.max_seq_length or max_length)
    names = {"input_ids": "ids", "token_type_ids": "type_ids"}
    names = {name: names[name] for name in names if name in tokenizer.model_input_names}

    def assemble(pairs):
        backend = tokenizer.backend_tokenizer
        backend.no_padding()
        backend.enable_truncation(limit, strategy="longest_first")
        coded = []
        for start in range(0, len(pairs), GROUP):  # what the tokenizer returns is large: a group at a time
            part = pairs[start : start + GROUP]
            claims, texts = (list(dict.fromkeys(side)) for side in zip(*part))
            claims = [claim for claim in claims if claim not in known]
            known.update(zip(claims, backend.encode_batch(claims, add_special_tokens=False)))
            texts = dict(zip(texts, backend.encode_batch(texts, add_special_tokens=False)))
            both = (backend.post_process(known[claim], texts[text], True) for claim, text in part)
            coded += [{name: getattr(one, attribute) for name, attribute in names.items()} for one in both]
        return coded

    def forward(batch):
        features = batch_to_device(dict(tokenizer.pad(batch, return_tensors="pt")), encoder.device)
        with first_token_last(encoder.model):
            return encoder.eval()(features)["scores"].float().cpu().numpy()

    return assemble, forward

def load_mono_t5(model, args):
    """monoT5 (Nogueira et al. 2020): logit of true minus logit of false, so that its sigmoid is P(true)."""
    with ticking(f"loading {model}"):
        import torch
        from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
        device, tokenizer = device_of(args.device), AutoTokenizer.from_pretrained(model)
        seq2seq = AutoModelForSeq2SeqLM.from_pretrained(model, dtype=numbers_of(args.dtype, device)).to(device).eval()
    limit = min(args.max_length, getattr(seq2seq.config, "max_position_embeddings", args.max_length))  # T5 has no such limit
    true, false = (tokenizer(word, add_special_tokens=False)["input_ids"][0] for word in ("true", "false"))

    def ids_of(text):
        return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def assemble(pairs):
        claims = {claim: ids_of(MONO_T5[0] + claim + MONO_T5[1].rstrip()) for claim in dict(pairs)}
        texts, end = {text: ids_of(text) for _, text in pairs}, [*ids_of(MONO_T5[2].strip()), tokenizer.eos_token_id]
        return [{"input_ids": [*claims[claim], *texts[text][: max(0, limit - len(claims[claim]) - len(end))], *end]}
                for claim, text in pairs]

    def forward(batch):
        features = tokenizer.pad(batch, return_tensors="pt").to(device)
        start = torch.full((len(batch), 1), seq2seq.config.decoder_start_token_id, device=device)
        logits = seq2seq(**features, decoder_input_ids=start).logits[:, 0].float()
        return (logits[:, [true]] - logits[:, [false]]).cpu().numpy()

    return assemble, forward

def score_pairs(scorer, pairs, budget, update=lambda pairs: None):
    """Numbers (pairs, labels) in the order given; pairs of like token length share a batch."""
    import torch
    assemble, forward = scorer
    coded, found = assemble(pairs), [None] * len(pairs)
    with torch.inference_mode():
        for rows in batches(np.array([len(one["input_ids"]) for one in coded]), budget):
            for row, numbers in zip(rows, forward([coded[row] for row in rows])):
                found[row] = numbers
            update(len(rows))
    found = np.array(found, dtype=float)
    if not np.isfinite(found).all():  # it would be sorted anywhere
        fail("--dtype", "a score is no number: the precision is too narrow for the model (take fp32 or bf16), or it "
             "is broken (train it with a lower --lr)")
    return found

def combine(relevance, stance, alpha, labels):
    """ComboScorer of +VeriRel 2025, eq. 4 and 5: alpha (P(SUPPORTS) + P(REFUTES)) + (1 - alpha) sigmoid(relevance).

    relevance (pairs,): logits; stance (pairs, 3): logits, in the order of labels.
    """
    from scipy.special import expit, softmax
    return alpha * (1 - softmax(stance, axis=1)[:, labels.index("NEI")]) + (1 - alpha) * expit(relevance)

def stance_labels(folder):
    """The three labels of a verifier, in the order of its head."""
    names = check_head(folder, 3)["id2label"]
    labels = [str(names[place]).upper() for place in sorted(names, key=int)]
    if sorted(labels) != sorted(LABELS):
        fail(folder, f"its labels are {', '.join(labels)}, not {', '.join(LABELS)}; train it with 05_classify.py train")
    return labels

def open_scoring(model, args):
    """score(pairs, update) -> (pairs,): the reranker's logits or, with --verifier, its combination with stance."""
    budget = args.batch_tokens or TOKENS["cuda" if device_of(args.device).startswith("cuda") else "cpu"]
    scorer = load_scorer(model, args)
    if not args.verifier:
        return lambda pairs, update: score_pairs(scorer, pairs, budget, update)[:, 0]
    folder = model_folder(args.verifier)
    labels, temperature = stance_labels(folder), check_head(folder, 3).get("stance_temperature", 1.0)  # as calibrated by 05
    verifier = load_scorer(folder, args, labels=3)
    return lambda pairs, update: combine(score_pairs(scorer, pairs, budget, update)[:, 0],
                                         score_pairs(verifier, pairs, budget) / temperature, args.alpha, labels)

# ----------------------------------------------------------- Rerank
def expand(scores, expanded, graph, beam):
    """The unscored neighbours of the best beam candidates that have not brought theirs in yet; expanded grows."""
    best = sorted(scores, key=lambda name: -scores[name])[:beam]
    fresh = [name for name in best if name not in expanded]
    expanded.update(fresh)
    return [name for name in dict.fromkeys(other for name in fresh for other in graph[name]) if name not in scores]

def score_group(candidates, claims, texts, score, graph, args, update):
    """{claim_id: {abstract_id: score}} for some claims; all pairs of a round are scored together, each pair once."""
    scores, expanded = {claim: {} for claim in candidates}, {claim: set() for claim in candidates}
    for turn in range(1 + (args.rounds if graph else 0)):
        new = {claim: expand(scores[claim], expanded[claim], graph, args.beam) for claim in scores} if turn else candidates
        pairs = [(claim, name) for claim, names in new.items() for name in names]
        if not pairs:
            break
        found = score([(claims[claim], texts[name]) for claim, name in pairs], update if not turn else lambda pairs: None)
        for (claim, name), number in zip(pairs, found.tolist()):
            scores[claim][name] = number
    return scores

def groups_of(candidates, size):
    """Whole claims, in order, size pairs or more at a time: the borders do not depend on where a run was interrupted."""
    groups, pairs = [[]], 0
    for claim, names in candidates.items():
        groups[-1].append(claim)
        pairs += len(names)
        if pairs >= size:
            groups.append([])
            pairs = 0
    return [group for group in groups if group]

def score_all(candidates, claims, texts, open_score, graph, args, folder, what="rerank", groups=1):
    """score_group for all claims. So many groups are a line of the journal in folder, durable before the next one is
    begun; those that stand there are not scored again, and the model is opened only when one is missing."""
    from tqdm.auto import tqdm
    path, done, score = folder / "journal.jsonl", {}, None
    for line in path.read_text(encoding="utf-8").split("\n") if path.exists() else []:
        with contextlib.suppress(ValueError):  # the last line may be torn
            record = json.loads(line)
            done[tuple(record)] = record
    whole = "".join(json.dumps(record) + "\n" for record in done.values())
    path.with_suffix(".tmp").write_text(whole, encoding="utf-8")  # without the torn line
    os.replace(path.with_suffix(".tmp"), path)
    scores = {}
    with open(path, "a", encoding="utf-8") as journal, \
            tqdm(total=sum(map(len, candidates.values())), desc=what, unit=" pairs") as bar:
        for group in groups_of(candidates, groups * GROUP):
            if tuple(group) not in done:
                score = score or open_score()
                part = {claim: candidates[claim] for claim in group}
                done[tuple(group)] = score_group(part, claims, texts, score, graph, args, bar.update)
                journal.write(json.dumps(done[tuple(group)]) + "\n")
                journal.flush()
                os.fsync(journal.fileno())
            else:
                bar.update(sum(len(candidates[claim]) for claim in group))
            scores |= done[tuple(group)]
    return scores

def z_scores(scores):
    """(score - mean) / standard deviation; 0 where all are equal."""
    spread = np.std(scores)
    return (scores - np.mean(scores)) / spread if spread else np.zeros(len(scores))

def blend(scores, first, weight):
    """{abstract_id: (1 - weight) z(score) + weight z(first stage's score)}; what that lacks counts like its last."""
    lowest = min(first.values())
    before = z_scores(np.array([first.get(name, lowest) for name in scores]))
    return dict(zip(scores, ((1 - weight) * z_scores(np.array(list(scores.values()))) + weight * before).tolist()))

def ranked(scores, order, top_k):
    """A run of {claim_id: {abstract_id: score}}, best first; equal scores in corpus order, {abstract_id: place}."""
    import pandas as pd
    rows = [(claim, name, rank, score) for claim, found in scores.items()
            for rank, (name, score) in enumerate(sorted(found.items(), key=lambda pair: (-pair[1], order[pair[0]])), 1)
            if rank <= (top_k or rank)]
    return pd.DataFrame(rows, columns=["claim_id", "abstract_id", "rank", "score"])

def rrf(runs, k=RRF_K):
    """{claim_id: {abstract_id: sum over runs of 1 / (k + rank)}} (Cormack et al. 2009)."""
    fused = {}
    for run in runs:
        for claim, name, rank in zip(run["claim_id"], run["abstract_id"], run["rank"]):
            fused.setdefault(claim, {})[name] = fused.get(claim, {}).get(name, 0.0) + 1 / (k + rank)
    return fused

def write_run(run, path, args, inputs, **facts):
    with written(path, args, inputs, rows=len(run), seed=args.seed, **facts) as temporary:
        run.to_csv(temporary, sep="\t", index=False, float_format="%.9g", lineterminator="\n")
    print(f"{path}: {len(run)} rows, {run['claim_id'].nunique()} claims")

def rerank(args):
    """Score the first candidates of each claim; what lies deeper in the run is left out."""
    models = [model_folder(model) for model in args.model]
    extra = [Path(args.graph), Path(args.graph) / "neighbours.npy"] if args.graph else []  # meta.json speaks for a folder
    verifier = model_folder(args.verifier) if args.verifier else None
    extra += [verifier] if verifier else []
    inputs = fingerprints(args.run, args.claims, args.corpus, *models, *extra)
    paths = [f"{args.out.removesuffix('.tsv')}.{number}.tsv" for number in range(1, len(models) + 1)] * (len(models) > 1)
    if up_to_date([args.out, *paths], args, inputs):
        return {"made": []}
    run, claims, texts = read_inputs(args, args.run)
    graph = read_graph(args.graph, args, inputs) if args.graph else None
    run = run[run["rank"] <= args.depth]
    first = {claim: dict(zip(rows["abstract_id"], rows["score"])) for claim, rows in run.groupby("claim_id", sort=False)}
    candidates = {claim: list(scores) for claim, scores in first.items()}
    order, runs = {name: place for place, name in enumerate(texts)}, []
    for model in models:
        check_head(model, 1)
    if verifier:
        stance_labels(verifier)
    if args.device != "auto":
        device_of(args.device)
    parts = workplace(Path(f"{args.out}.parts"), args, inputs)
    for number, model in enumerate(models):
        (parts / str(number)).mkdir(exist_ok=True)
        scores = score_all(candidates, claims, texts, lambda model=model: open_scoring(model, args), graph, args,
                           parts / str(number))
        if args.first_stage:
            scores = {claim: blend(found, first[claim], args.first_stage) for claim, found in scores.items()}
        runs.append(ranked(scores, order, args.top_k if len(models) == 1 else 0))
    for path, one in zip(paths, runs):
        write_run(one, path, args, inputs)
    write_run(runs[0] if len(runs) == 1 else ranked(rrf(runs), order, args.top_k), args.out, args, inputs)
    remove(parts)
    return {"made": [args.out, *paths], "pairs": len(runs[0])}

# ----------------------------------------------------------- Examples
def mine_pairs(claim, candidates, labels, hard, easy, pool, rng):
    """Examples for binary cross-entropy: [{claim_id, abstract_id, kind, judged, target}]; none without a positive.

    candidates: [abstract_id, best first]; labels: {abstract_id: label} of this claim. Negatives are NEI, or
    candidates that are unjudged, or both (pool); the best ranked of them are hard, easy ones are drawn from the
    rest. Never is an abstract judged relevant a negative.
    """
    positives = [name for name, label in labels.items() if label != "NEI"]
    unranked = [name for name, label in labels.items() if label == "NEI" and name not in candidates]
    judged = {"nei": (True,), "unjudged": (False,), "both": (True, False)}[pool]
    rest = [name for name in [*candidates, *unranked] if name not in positives and (name in labels) in judged]
    drawn = rng.choice(len(rest[hard:]), min(easy, len(rest[hard:])), replace=False)
    kinds = {"positive": positives, "hard": rest[:hard], "easy": [rest[hard + place] for place in sorted(drawn)]}
    return [{"claim_id": claim, "abstract_id": name, "kind": kind, "judged": name in labels,
             "target": float(kind == "positive")} for kind in kinds for name in kinds[kind] if positives]

def mine_margins(claim, candidates, labels, hard, easy, names, rng):
    """Examples for the margin loss: [{claim_id, positive, negative, kind}] (Ant Bridge 2025).

    candidates: [abstract_id, best first] as the untrained reranker has them. For every positive, hard negatives
    are drawn from their first 500 without the positives, easy ones from the whole corpus, names.
    """
    positives = [name for name, label in labels.items() if label != "NEI"]
    top = [name for name in candidates if name not in positives][:FROM_TOP]
    examples = []
    for positive in positives:
        chosen = [(top[place], "hard") for place in rng.choice(len(top), min(hard, len(top)), replace=False)]
        drawn = [names[place] for place in rng.choice(len(names), min(easy + len(positives), len(names)), replace=False)]
        chosen += [(name, "easy") for name in [name for name in drawn if name not in positives][:easy]]
        examples += [{"claim_id": claim, "positive": positive, "negative": name, "kind": kind} for name, kind in chosen]
    return examples

def distilled(claim, scores, labels, depth):
    """Examples for the student: the teacher's best and all evidence; target 1 for evidence, else the teacher's score.

    scores: {abstract_id: combined score between 0 and 1, best first} (+VeriRel 2025).
    """
    relevant = [name for name, label in labels.items() if label != "NEI"]
    chosen = dict.fromkeys([*list(scores)[:depth], *relevant]) if relevant else ()
    return [{"claim_id": claim, "abstract_id": name, "kind": "positive" if name in relevant else "taught",
             "judged": name in labels, "target": 1.0 if name in relevant else scores[name]} for name in chosen]

# ----------------------------------------------------------- Train
def fit(encoder, examples, loss, claims, texts, epochs, evaluator, folder, args):
    """Train on examples by loss (bce, margin, l1, warm); the best epoch on dev is kept. Returns dev's curve."""
    import torch
    from datasets import Dataset
    from sentence_transformers.cross_encoder import CrossEncoderTrainer, CrossEncoderTrainingArguments, losses
    from transformers import EarlyStoppingCallback
    columns = {"claim": [claims[example["claim_id"]] for example in examples]}
    if loss == "margin":  # max(0, margin - (logit of the positive - logit of the negative)): the label is that of a hinge
        columns |= {side: [texts[example[side]] for example in examples] for side in ("positive", "negative")}
        columns["label"] = [-1.0] * len(examples)
        objective = losses.MarginMSELoss(encoder)
        objective.loss_fct = torch.nn.HingeEmbeddingLoss(margin=args.margin)
    else:
        columns["abstract"] = [texts[example["abstract_id"]] for example in examples]
        columns["label"] = [example["target"] for example in examples]
        objective = losses.BinaryCrossEntropyLoss(encoder)
        if loss != "bce":
            objective = losses.MSELoss(encoder, torch.nn.Sigmoid() if loss == "l1" else torch.nn.Identity())
            objective.loss_fct = torch.nn.L1Loss() if loss == "l1" else torch.nn.SmoothL1Loss()
    precision, best = precision_of(encoder.device), "eval_dev_Subtask I"
    watched = {"eval_strategy": "epoch", "load_best_model_at_end": True, "metric_for_best_model": best,
               "greater_is_better": True} if evaluator else {}
    how = CrossEncoderTrainingArguments(
        output_dir=str(folder), num_train_epochs=epochs, per_device_train_batch_size=args.batch_size,
        learning_rate=WARM["lr"] if loss == "warm" else args.lr, weight_decay=WEIGHT_DECAY,
        lr_scheduler_type="cosine" if loss == "l1" else "linear", seed=args.seed, data_seed=args.seed,
        bf16=precision == "bf16", fp16=precision == "fp16", restore_callback_states_from_checkpoint=True,
        activation_checkpointing=args.gradient_checkpointing, use_cpu=encoder.device.type == "cpu",
        save_strategy="epoch", save_total_limit=2, logging_strategy="epoch", report_to=args.report_to,
        disable_tqdm=False, dataloader_pin_memory=False, **watched)
    trainer = CrossEncoderTrainer(
        encoder, how, Dataset.from_dict(columns), loss=objective, evaluator=evaluator,
        callbacks=[EarlyStoppingCallback(args.patience)] if evaluator else [])
    trainer.train(resume_from_checkpoint=resume(folder, how))
    return [{name.removeprefix("eval_dev_"): round(value, 4) for name, value in line.items() if name.startswith("eval_dev_")}
            for line in trainer.state.log_history if best in line]

def measures(ranking, labels):
    """ClimateCheck 2025's measures for one claim, in the organisers' arithmetic (see 06_evaluate.py)."""
    relevant = {name for name, label in labels.items() if label != "NEI"}
    row = {f"R@{k}": len(relevant.intersection(ranking[:k])) / len(relevant) for k in (2, 5, 10)}
    if len(relevant) == len(labels):
        return row
    above, points = 0, 0.0
    for name in (name for name in ranking if name in labels):
        points += (1 - above / len(relevant)) if name in relevant else 0
        above = min(above + (name not in relevant), len(relevant))
    return row | {"B-Pref": points / len(relevant)}

def dev_evaluator(encoder, texts, args):
    """Stage 6's measures of the reranked --dev-run; None where there is none."""
    paths = {name: Path(args.data) / f"{name}.{args.dev_split}.tsv" for name in ("claims", "qrels")}
    path = Path(args.dev_run.replace("{dev_split}", args.dev_split))
    if not (args.dev_split and path.exists() and all(other.exists() for other in paths.values())):
        print(f"no dev split ({path}): the model of the last epoch is kept")
        return None
    from sentence_transformers.base.evaluation import BaseEvaluator
    claims = read_table(paths["claims"], ["claim_id", "claim"])
    claims = dict(zip(claims["claim_id"], claims["claim"]))
    qrels = read_table(paths["qrels"], ["claim_id", "abstract_id", "label"], claim_id=claims, abstract_id=texts)
    run = read_table(path, ["claim_id", "abstract_id", "rank", "score"], claim_id=claims, abstract_id=texts)
    labels = labels_of(qrels)
    labels = {claim: found for claim, found in labels.items() if set(found.values()) != {"NEI"}}
    run = run[(run["rank"] <= args.dev_depth) & run["claim_id"].isin(labels)]
    candidates = {claim: list(rows["abstract_id"]) for claim, rows in run.groupby("claim_id", sort=False)}

    class OnDev(BaseEvaluator):
        """What the trainer asks after every epoch."""

        def __call__(self, model, output_path=None, epoch=-1, steps=-1):
            found = rescored(model, candidates, claims, texts, args)
            rows = [measures(found.get(claim, []), labels[claim]) for claim in labels]
            means = {name: float(np.mean([row[name] for row in rows if name in row] or [0]))
                     for name in ("R@2", "R@5", "R@10", "B-Pref")}
            means["Subtask I"] = sum(means.values()) / len(means)
            return {f"dev_{name}": round(value, 6) for name, value in means.items()}

    evaluator = OnDev()
    evaluator.primary_metric = "dev_Subtask I"
    print(f"dev: {len(labels)} claims, {len(run)} pairs; before training {evaluator(encoder)}")
    return evaluator

def labels_of(qrels):
    """{claim_id: {abstract_id: label}}."""
    return {claim: dict(zip(rows["abstract_id"], rows["label"])) for claim, rows in qrels.groupby("claim_id", sort=False)}

def rescored(encoder, candidates, claims, texts, args, folder=None):
    """{claim_id: [abstract_id, best first]} by the encoder as it is now; equal scores as they stood. What was scored
    before a crash stands in folder, if there is one."""
    import torch
    scorer, cuda = cross_encoder_scorer(encoder, args.max_length), encoder.device.type == "cuda"

    def score(pairs, update):
        with torch.autocast("cuda", numbers_of("auto", encoder.device), enabled=cuda):  # as it is trained
            return score_pairs(scorer, pairs, TOKENS["cuda" if cuda else "cpu"], update)[:, 0]

    with tempfile.TemporaryDirectory() if folder is None else contextlib.nullcontext(folder) as place:
        found = score_all(candidates, claims, texts, lambda: score, None, args, Path(place), "mine", 16)
    return {claim: sorted(names, key=lambda name: -names[name]) for claim, names in found.items()}

def imitate(run, claims, texts, rng, args):
    """Examples for the warm start: --warm-pairs of a run's pairs, and what a bi-encoder, or the run itself, says of them.

    A bi-encoder's weights do not know how to compare two texts in one input; imitating its own similarity
    teaches them that first, without a label (Trans-Encoder, Liu et al. 2022): targets are scale x (cosine - middle).
    The scores of a run (--warm-start FILE), which may fuse retrievers, become targets of mean 0 and deviation 2.
    """
    run = run.iloc[sorted(rng.permutation(len(run))[: args.warm_pairs])]
    scores = run["score"].to_numpy()
    targets = 2 * (scores - scores.mean()) / (scores.std() or 1)
    if not Path(args.warm_start).is_file():
        with ticking(f"loading {args.warm_start}"):
            from sentence_transformers import SentenceTransformer
            encoder = SentenceTransformer(str(model_folder(args.warm_start)), device=device_of(args.device))
        vectors = {}
        for column, known in (("claim_id", claims), ("abstract_id", texts)):
            rows, names = run[column].factorize()
            encode = encoder.encode_query if column == "claim_id" else encoder.encode_document
            found = encode([known[name] for name in names], normalize_embeddings=True, show_progress_bar=True)
            vectors[column] = found[rows]
        targets = WARM["scale"] * ((vectors["claim_id"] * vectors["abstract_id"]).sum(axis=1) - WARM["middle"])
    return [{"claim_id": claim, "abstract_id": name, "kind": "warm", "target": round(float(target), 6)}
            for claim, name, target in zip(run["claim_id"], run["abstract_id"], targets)]

def mine(candidates, qrels, run, texts, rng, args):
    """All examples of one phase, claim by claim, by --recipe."""
    examples, names = [], list(texts)
    scores = {claim: dict(zip(rows["abstract_id"], rows["score"])) for claim, rows in run.groupby("claim_id", sort=False)}
    for claim, labels in labels_of(qrels).items():
        best = candidates.get(claim, [])
        if args.recipe == "margin":
            examples += mine_margins(claim, best, labels, args.hard, args.easy, names, rng)
        elif args.recipe == "distil":
            examples += distilled(claim, scores.get(claim, {}), labels, args.depth)
        else:
            examples += mine_pairs(claim, best, labels, args.hard, args.easy, args.pool, rng)
    return examples

def read_examples(path, recipe, phases, claims, texts):
    """The lines of --examples, all of them such as recipe writes, in so many phases."""
    known = {"claim_id": claims} | dict.fromkeys(("positive", "negative") if recipe == "margin" else ("abstract_id",), texts)
    fields, examples = [*known, "kind", *(["target"] if recipe != "margin" else [])], []
    if Path(path).is_dir():
        fail(path, "a folder; name the file beside it that ends in .examples.jsonl")
    for number, line in enumerate(open(path, "rb"), 1):
        try:
            example = json.loads(line)
            values = {name: example[name] for name in fields}
            unknown = [f"{name} {values[name]!r}" for name in known if values[name] not in known[name]]
            if not 0 <= values.get("target", 0) <= 1:
                raise ValueError
        except (ValueError, KeyError, TypeError, RecursionError):
            fail(f"{path}:{number}", f"no JSON object with {', '.join(fields)}, which --recipe {recipe} trains on (a target "
                 "lies between 0 and 1); give a file that this recipe wrote")
        if unknown:
            fail(f"{path}:{number}", f"unknown {unknown[0]}; give the files that go together")
        if example.setdefault("phase", 1) not in range(1, phases + 1):
            fail(f"{path}:{number}", f"phase {example['phase']} of {phases}; give the recipe that wrote it, or --epochs "
                 "one number a phase")
        examples.append(example)
    if absent := set(range(1, phases + 1)) - {example["phase"] for example in examples}:
        fail(path, f"it has no example of phase {min(absent)}; give --epochs one number a phase, or another file")
    return examples

def phase(folder, make_examples, encoder, loss, claims, texts, epochs, evaluator, args):
    """(encoder, examples, dev's curve) of one phase; what stands whole in folder is not made again."""
    folder.mkdir(exist_ok=True)
    path, model, curve = folder / "examples.jsonl", folder / "model", folder / "curve.json"
    if not path.exists():
        lines = [json.dumps(example, ensure_ascii=False) + "\n" for example in make_examples()]
        path.with_suffix(".tmp").write_text("".join(lines), encoding="utf-8")
        os.replace(path.with_suffix(".tmp"), path)
    examples = list(map(json.loads, path.read_text(encoding="utf-8").splitlines()))
    if not model.is_dir():
        found = fit(encoder, examples, loss, claims, texts, epochs, evaluator, folder, args)
        curve.write_text(json.dumps(found), encoding="utf-8")
        encoder.save_pretrained(str(folder / "saving"), create_model_card=False)
        os.replace(folder / "saving", model)
    return load_cross_encoder(model, args, labels=1), examples, json.loads(curve.read_text(encoding="utf-8"))

def train_one(args):
    """Fine-tune one cross-encoder: warm start where it is asked for, then the phases of the recipe."""
    model, taught = model_folder(args.model[0]), Path(args.warm_start or "").is_file()
    warm = [Path(args.warm_start) if taught else model_folder(args.warm_start)] if args.warm_start else []
    optional = [Path(args.data) / f"{name}.{args.dev_split}.tsv" for name in ("claims", "qrels")]
    optional = [path for path in [*optional, Path(args.dev_run.replace("{dev_split}", args.dev_split))] if path.exists()]
    optional += [args.examples] if args.examples else []
    inputs = fingerprints(args.run, args.claims, args.corpus, args.qrels, model, *warm, *optional)
    examples_path = f"{args.out}.examples.jsonl"
    if up_to_date([args.out, examples_path], args, inputs):
        return {"made": []}
    run, claims, texts = read_inputs(args, args.run)
    qrels = read_table(args.qrels, ["claim_id", "abstract_id", "label"], claim_id=claims, abstract_id=texts)
    if not (qrels["label"] != "NEI").any():
        fail(args.qrels, "no pair is judged SUPPORTS or REFUTES: there is nothing to train on; take another split")
    ranked = ["claim_id", "abstract_id", "rank", "score"]
    teacher = read_table(args.warm_start, ranked, claim_id=claims, abstract_id=texts) if taught else run
    teacher = teacher[teacher["rank"] <= args.depth]
    if args.recipe == "distil" and not run["score"].between(0, 1).all():
        fail(args.run, "its scores are no combined ones between 0 and 1; make it with 03_rerank.py --verifier")
    run = run[run["rank"] <= args.depth]
    candidates = {claim: list(rows["abstract_id"]) for claim, rows in run.groupby("claim_id", sort=False)}
    check_head(model, 1, trained=False)
    phases = [epochs for epochs in args.epochs if epochs]  # 0: the warm start alone
    given = read_examples(args.examples, args.recipe, len(phases), claims, texts) if args.examples else []
    if args.device != "auto":
        device_of(args.device)
    encoder = load_cross_encoder(model, args, labels=1)
    evaluator = dev_evaluator(encoder, texts, args)
    parts, all_examples, curves = workplace(Path(f"{args.out}.parts"), args, inputs), [], []
    loss = {"margin": "margin", "distil": "l1"}.get(args.recipe, "bce")
    if args.warm_start:
        def warm_examples():
            return imitate(teacher, claims, texts, np.random.default_rng([args.seed, 0]), args)

        encoder, _, curves = phase(parts / "warm", warm_examples, encoder, "warm", claims, texts, 1, evaluator, args)
    for number, epochs in enumerate(phases, 1):
        def examples_of(number=number, encoder=encoder):
            if args.examples:
                return [example for example in given if example["phase"] == number]
            anew = number > 1 or args.recipe == "margin"
            best = rescored(encoder, candidates, claims, texts, args, parts / f"phase-{number}") if anew else candidates
            mined = mine(best, qrels, run, texts, np.random.default_rng([args.seed, number]), args)
            return ({**example, "phase": number} for example in mined)

        encoder, examples, curve = phase(parts / f"phase-{number}", examples_of, encoder, loss, claims, texts, epochs,
                                         evaluator, args)
        all_examples, curves = all_examples + examples, curves + curve
    kinds = {kind: sum(example["kind"] == kind for example in all_examples)
             for kind in dict.fromkeys(example["kind"] for example in all_examples)}
    skipped = qrels["claim_id"].nunique() - len({example["claim_id"] for example in all_examples})
    print(f"{len(all_examples)} examples: {kinds}, {skipped} claims without a positive left out")
    facts = {**kinds, "claims_skipped": skipped, "seed": args.seed, "device": str(encoder.device), "dev": curves}
    with written(examples_path, args, inputs, **facts) as temporary:
        lines = [json.dumps(example, ensure_ascii=False) + "\n" for example in all_examples]
        temporary.write_text("".join(lines), encoding="utf-8")
    with written(args.out, args, inputs, **facts) as temporary:
        encoder.save_pretrained(str(temporary), create_model_card=False)
    remove(parts)
    return {"made": [args.out, examples_path], "examples": len(all_examples), "dev": curves}

def train(args):
    """Fine-tune a cross-encoder on the judged pairs of one split; with --sweep, Ant Bridge's five."""
    one_gpu(args)
    if args.sweep and (args.recipe != "margin" or len(args.model) > 2 or args.batch_size or args.margin is not None):
        fail("--sweep", "it trains one or two models by --recipe margin, with batch sizes and margins of its own; leave out "
             "--batch-size, --margin, and what --model names beyond two")
    if not args.sweep and len(args.model) > 1:
        fail("--model", f"{len(args.model)} models, but one is trained; name one, or give --recipe margin --sweep")
    for name, value in {"margin": MARGIN, **RECIPES[args.recipe]}.items():
        setattr(args, name, value if getattr(args, name) is None else getattr(args, name))
    if not args.sweep:
        return train_one(args)
    made = []
    for number, (size, margin, which) in enumerate(SWEEP, 1):
        own = {"batch_size": size, "margin": margin, "model": [args.model[which]], "out": f"{args.out}-{number}"}
        made += train_one(argparse.Namespace(**vars(args) | own))["made"]
    return {"made": made}

# ----------------------------------------------------------- Main
def model_flags(add):
    add("--claims", default="{data}/claims.{split}.tsv", help="the claims")
    add("--corpus", default="{data}/corpus.jsonl", help="the abstracts")
    add("--max-length", type=at_least(1), default=512, help="tokens kept of claim and abstract together")

def rerank_flags(add):
    add("--run", "--in", default="{work}/{split}/hybrid.tsv", help="the run whose candidates are scored")
    model_flags(add)
    add("--model", nargs="+", default=["{work}/models/reranker"],
        help="cross-encoders with one logit, or sequence-to-sequence rerankers that say true or false: folders or hub ids")
    add("--out", default="{work}/{split}/rerank.tsv", help="the reranked run")
    add("--depth", type=at_least(1), default=20, help="candidates scored a claim")
    add("--top-k", type=at_least(0), default=0, help="abstracts kept a claim; 0 keeps all that were scored")
    add("--first-stage", type=float, default=0.0, help="weight of the given run's score beside the model's, as "
        "z-scores (to try several, fuse the two runs with 02_retrieve.py fuse --method zscore: nothing is scored again)")
    add("--graph", help="neighbour graph: the neighbours of the best are scored, too (AlexUNLP-FMT)")
    add("--rounds", type=at_least(1), default=ROUNDS, help="graph: how often neighbours may come in")
    add("--neighbours", type=at_least(1), default=NEIGHBOURS, help="graph: neighbours that an abstract brings in")
    add("--beam", type=at_least(1), default=BEAM, help="graph: how many of the best bring theirs in")
    add("--verifier", help="stance classifier: P(SUPPORTS) + P(REFUTES) joins the score (+VeriRel)")
    add("--alpha", type=float, default=ALPHA, help="verifier: its weight")
    add("--batch-tokens", type=at_least(0), default=0, help="tokens scored at once; 0 takes what suits the device")
    add("--dtype", choices=("auto", "fp32", "fp16", "bf16"), default="auto", help="auto: bf16 on a GPU, else fp32")

def train_flags(add):
    add("--run", "--in", default="{work}/{split}/hybrid.tsv", help="the run that negatives are taken from")
    model_flags(add)
    add("--qrels", default="{data}/qrels.{split}.tsv", help="the judged pairs")
    add("--model", nargs="+", default=["data/models/minilm"], help="where to start: any encoder, folder or hub id")
    add("--out", default="{work}/models/reranker", help="folder of the trained model")
    add("--recipe", choices=RECIPES, default="two-phase", help="Kiepura & Lam, AIRwaves, Ant Bridge or +VeriRel")
    add("--examples", help="train on this file (as is written beside a model) instead of mining")
    add("--warm-start", help="bi-encoder (folder or hub id) whose similarity, or run (file) whose scores, are imitated "
        "before the labels are seen")
    add("--warm-pairs", type=at_least(0), default=16_000, help="pairs for that")
    add("--depth", type=at_least(1), help="candidates of the run that negatives come from; by recipe 200, 20, 1000, 20")
    add("--hard", type=at_least(0), help="hard negatives a claim (margin: a positive); by recipe 4, 8, 5, 0")
    add("--easy", type=at_least(0), help="easy negatives; by recipe 4, 0, 10, 0")
    add("--pool", choices=("nei", "unjudged", "both"), help="what may be a negative")
    add("--margin", type=float, help=f"margin: by how much a positive should lead; {MARGIN}")
    add("--sweep", action="store_true", help="margin: the five models of Ant Bridge; give --model LARGE M3")
    add("--epochs", type=float, nargs="+", help="passes over the examples, phase by phase; by recipe 3 2, 3, 1, 10; "
        "0 leaves it at the warm start")
    add("--lr", type=float, help="learning rate; 2e-5, distil 1e-5")
    add("--batch-size", type=at_least(1), help="examples a step; 16, distil 64")
    add("--gradient-checkpointing", action="store_true", help="less memory, a third more time")
    add("--dev-split", default="dev", help="where there is one, the best epoch on it is kept")
    add("--dev-run", default="{work}/{dev_split}/hybrid.tsv", help="the run reranked for that")
    add("--dev-depth", type=at_least(1), default=20, help="candidates of it scored a claim")
    add("--patience", type=at_least(1), default=2, help="epochs without a gain on dev before training stops")
    add("--report-to", default="none", help="none, tensorboard, wandb")

def main():
    run_job(__doc__, {"rerank": (rerank, rerank_flags), "train": (train, train_flags)})

if __name__ == "__main__":
    main()
