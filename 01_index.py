"""
Index the abstracts: BM25, dense embeddings and SPLADE; their neighbour graph; and fine-tune the dense encoder.

Reads   data/NAME/corpus.jsonl: abstract_id, abstract, optional title and other fields
        train: claims.SPLIT.tsv and qrels.SPLIT.tsv, too
Writes  work/NAME/index/bm25/    postings of bm25s, by term
        work/NAME/index/dense/   embeddings.npy: abstracts x dimensions, float16, each of length 1
        work/NAME/index/splade/  data.npy, indices.npy, indptr.npy: weights by term (CSC, abstracts x vocabulary)
        work/NAME/index/graph/   neighbours.npy, similarities.npy: abstracts x k, nearest first
        In each: abstract_ids.json (row to id), meta.json (corpus fingerprint, analyser or model, shapes).
        work/NAME/models/encoder/, and encoder.examples.jsonl, what it was trained on
        FOLDER.parts/ holds what was encoded before a crash, so that it is not encoded again.
Prints  one line of JSON, last on stdout

Examples
    python 01_index.py
    python 01_index.py --indexes bm25 --analyser nltk --k1 1.2 --b 0.75
    python 01_index.py --indexes dense --dense-model BAAI/bge-m3 --max-length 1024 --fields title,abstract,journal
    python 01_index.py graph --neighbours 10
    python 01_index.py train --loss mnrl --hard-negatives 1 --negatives-run work/demo/train/bm25.tsv
"""
import argparse
import contextlib
import functools
import hashlib
import itertools
import json
import multiprocessing
import os
import re
import resource
import shutil
import signal
import sys
import threading
import time
import zipfile
from array import array
from collections import defaultdict
from pathlib import Path

import numpy as np

BM25_METHODS = ("lucene", "robertson", "atire", "bm25l", "bm25+")  # as bm25s names them
CHUNK = 8192                           # abstracts that a process analyses at a time
POSTINGS = 4_000_000                   # postings scored at a time: some hundred MiB
SHARD = 4096                           # abstracts encoded between two points to restart from, unless --shard-size says
PADDING = 0.05                         # largest share of a batch that may be padding
TOKENS = {"dense": (2_048, 32_768), "splade": (512, 16_384)}  # tokens a batch on CPU, GPU; the logits of SPLADE are wide
OVERLAP = 50                           # tokens that neighbouring windows share (AIRwaves 2025, section 3)
NEIGHBOURS = 10                        # AlexUNLP-FMT 2025
ROWS = {"cpu": 256, "cuda": 2048}      # rows of the similarity matrix held at once: 0.4 and 3 GiB at 394,269 abstracts
BLOCK = 65_536                         # rows of the dense matrix turned to float32 at once
MARGIN, SCALE, WARMUP = 0.3, 20, 0.1   # triplet: Kiepura & Lam 2025; MNRL: AIRwaves 2025; both warm up over 10 %
LOSSES = {  # what a loss is trained with where no flag says otherwise
    "triplet": {"epochs": 3, "lr": 5e-5, "batch_size": 32, "accumulate": 2},  # Kiepura & Lam 2025, section 4.1
    "mnrl": {"epochs": 2, "lr": 7e-6, "batch_size": 64, "accumulate": 1},     # AIRwaves 2025, section 3
}

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

# --- texts to terms and vectors: the same block in 01_index.py and 02_retrieve.py
def default_analyser(model):
    """As bm25s: lower case, words of two characters and more, Lucene's 33 English stopwords out, Snowball stems."""
    import Stemmer
    from bm25s.stopwords import STOPWORDS_EN
    words, stem = re.compile(r"(?u)\b\w\w+\b").findall, Stemmer.Stemmer("english").stemWords
    return (lambda texts: (words(text.lower()) for text in texts),
            lambda words: [None if word in STOPWORDS_EN else stem for word, stem in zip(words, stem(words))])

def plain_analyser(model):
    """What stands between white space, nothing changed or removed (AIRwaves' raw baseline)."""
    return lambda texts: map(str.split, texts), lambda words: words

def nltk_analyser(model):
    """Lower case, punctuation removed, NLTK's 179 English stopwords out (Ant Bridge, organisers of ClimateCheck)."""
    from bm25s.stopwords import STOPWORDS_EN_PLUS  # NLTK's list, without its download at run time
    stopwords = frozenset(STOPWORDS_EN_PLUS)
    bare = re.compile(r"[^\w\s]|_").sub
    return (lambda texts: (text.lower().split() for text in texts),
            lambda words: [None if word in stopwords or (term := bare("", word)) in stopwords else term or None
                           for word in words])

def spacy_analyser(model):
    """Lower-cased lemmas of alphanumeric tokens, spaCy's stopwords out (AIRwaves); spaCy is not in requirements.txt."""
    try:
        import spacy
        nlp = spacy.load(model, exclude=["parser", "ner"])
    except (ImportError, OSError):
        fail("--analyser spacy", f"it needs spaCy and its pipeline {model}: pip install spacy, python -m spacy download "
             f"{model}; or name a pipeline's folder with --spacy-model")
    return (lambda texts: ([token.lemma_.lower() for token in doc if token.text.isalnum() and not token.is_stop]
                           for doc in nlp.pipe(texts)), lambda words: words)

# analyser(model) -> split(texts): the words of each text; terms(words): what each word is indexed as, None for nothing
ANALYSERS = {"default": default_analyser, "plain": plain_analyser, "nltk": nltk_analyser, "spacy": spacy_analyser}

def load_encoder(kind, folder, device, dtype, max_length=None):
    """SentenceTransformer or SparseEncoder; a bare masked language model gets the pooling of SPLADE on top."""
    with ticking(f"loading {folder}"):
        import torch
        from sentence_transformers import SentenceTransformer, SparseEncoder
        from sentence_transformers.base.modules import Transformer
        from sentence_transformers.sparse_encoder.modules import SpladePooling
        device = device_of(device)
        dtype = precision_of(device) if dtype == "auto" else dtype
        how = {"model_kwargs": {"dtype": {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[dtype]}}
        if kind == "dense":
            encoder = SentenceTransformer(str(folder), device=device, **how)
        elif (folder / "modules.json").is_file():
            encoder = SparseEncoder(str(folder), device=device, **how)
        else:
            masked = Transformer(str(folder), transformer_task="fill-mask", **how)
            encoder = SparseEncoder(modules=[masked, SpladePooling("max")], device=device)
    if max_length and max_length < (encoder.max_seq_length or sys.maxsize):
        encoder.max_seq_length = max_length
    return encoder, dtype

TERMS = 2_048  # of the vocabulary, whose logits are held at once
ACTIVATIONS = {
    "log1p_relu": lambda logits: logits.relu().log1p(),  # SPLADE-v3 as published (Formal et al. 2021)
    "relu": lambda logits: logits.relu(),                # Kiepura & Lam 2025, eq. 2
}

def sparse_vectors(encoder, texts, activation, task):
    """(texts, vocabulary) float32: w_v = max over tokens of activation(logit), padding masked out.

    Both activations rise with the logit, so the maximum comes first: one row a text to activate instead
    of one a token. Encoders of another build (sums, static query weights) do as they were made to.
    """
    import torch
    from sentence_transformers.sparse_encoder.modules import SpladePooling
    from sentence_transformers.util import batch_to_device
    splade = len(encoder) == 2 and isinstance(encoder[1], SpladePooling) and encoder[1].pooling_strategy == "max"
    head = encoder[0].model.get_output_embeddings() if splade else None
    if not isinstance(head, torch.nn.Linear) or encoder[1].activation_function != "relu":  # ReLU, then the logarithm: "relu"
        if activation != "log1p_relu":
            fail("--activation", f"{activation} needs a SPLADE model with max pooling; leave the flag out for this one")
        encode = {"query": encoder.encode_query, "document": encoder.encode_document}[task]
        return encode(texts, batch_size=len(texts), convert_to_sparse_tensor=False, save_to_cpu=True).float().numpy()
    encoder[0].unpad_inputs = False
    with torch.inference_mode():
        features = batch_to_device(encoder.preprocess(texts, prompt=encoder.prompts.get(task), task=task), encoder.device)
        with largest_logits(head, features["attention_mask"] == 0):
            logits = encoder.eval()[0](features)["token_embeddings"][:, 0]
        return ACTIVATIONS[activation](logits.float()).cpu().numpy()

@contextlib.contextmanager
def largest_logits(head, padding):
    """While this lasts, head (linear, from hidden states to the vocabulary) gives one row a text: each term's maximum over
    the tokens, 0 for padding. It goes by blocks of terms, as 30,522 logits a token at once are slow to write and to read."""
    import torch

    def forward(hidden):
        parts = zip(head.weight.split(TERMS), [None] * len(head.weight) if head.bias is None else head.bias.split(TERMS))
        blocks = (torch.nn.functional.linear(hidden, weight, bias) for weight, bias in parts)
        return torch.cat([block.masked_fill_(padding[..., None], 0).amax(dim=1) for block in blocks], 1)[:, None]

    head.forward = forward
    try:
        yield
    finally:
        del head.forward
# --- end of texts to terms and vectors

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

# ----------------------------------------------------------- Texts
def text_of(record, fields, separator=" "):
    """The text that stands for an abstract: its fields that are not empty, joined; a list's items by commas."""
    values = (", ".join(map(str, value)) if isinstance(value, list) else value for value in map(record.get, fields))
    return separator.join(text for value in values if value is not None and (text := str(value).strip()))

def read_texts(args):
    """{abstract_id: text} in corpus order."""
    fields = [field.strip() for field in args.fields.split(",")]
    texts = {name: text_of(record, fields, args.separator) for name, record in read_corpus(args.corpus).items()}
    if not any(texts.values()):
        fail(args.corpus, f"no record has text in {args.fields}; check --fields and the file")
    return texts

# ----------------------------------------------------------- Shards
def sharded(folder, count, size, make, unit):
    """Yield make(start, stop, update) for the rows 0 to count, size at a time: {name: array}.

    Each is a file in folder, durable before the next one is begun; those that stand there whole (their
    checksums say so) are read back instead of made. Shards have fixed borders, and no batch crosses one:
    the bytes do not depend on where a run was interrupted.
    """
    from tqdm.auto import tqdm
    with tqdm(total=count, desc=unit, unit=" abstracts") as bar:
        for start in range(0, count, size):
            stop, path = min(start + size, count), folder / f"{start:09d}.npz"
            try:
                with np.load(path) as file:
                    arrays = dict(file)
            except (OSError, ValueError, zipfile.BadZipFile):
                arrays, temporary = make(start, stop, bar.update), path.with_suffix(".tmp")
                with open(temporary, "wb") as file:
                    np.savez(file, **arrays)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(temporary, path)
            bar.update(stop - bar.n)
            yield arrays

def budget_of(kind, encoder, args):
    """Tokens a batch: --batch-tokens, or what suits the device."""
    return args.batch_tokens or TOKENS[kind][encoder.device.type != "cpu"]

def token_lengths(encoder, texts):
    """Tokens of each text before anything is cut off; where the tokenizer is no common one, its words."""
    try:
        return np.array(list(map(len, encoder.tokenizer(texts, truncation=False, verbose=False)["input_ids"])), np.int64)
    except TypeError:
        return np.array([len(text.split()) + 1 for text in texts], np.int64)

# ----------------------------------------------------------- BM25
def watch_parent():
    """In a worker: leave Ctrl-C to the parent, and go when it was killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gone = multiprocessing.parent_process().join
    threading.Thread(target=lambda: gone() or os._exit(1), daemon=True).start()

def analyse(task):
    """Of task = (texts, analyser, its model): terms, in the order in which they occur first; ids (tokens,) int32,
    the term of every token that is indexed, text after text; lengths (texts,) int32, how many each text has.
    """
    texts, name, model = task
    split, terms_of = ANALYSERS[name](model)
    numbers, ids, lengths = defaultdict(itertools.count().__next__), array("i"), []
    for words in split(texts):
        ids.extend(map(numbers.__getitem__, words))
        lengths.append(len(words))
    terms = terms_of(list(numbers))
    vocabulary = {term: number for number, term in enumerate(dict.fromkeys(term for term in terms if term is not None))}
    number_of = np.array([vocabulary.get(term, -1) for term in terms] or [-1], np.int32)
    ids = number_of[np.frombuffer(ids, np.int32)] if ids else np.empty(0, np.int32)
    rows = np.repeat(np.arange(len(texts)), lengths)
    return list(vocabulary), ids[ids >= 0], np.bincount(rows[ids >= 0], minlength=len(texts)).astype(np.int32)

def analyse_all(texts, name, model):
    """(vocabulary {term: number}, ids, lengths) of all texts, on all cores; the same for any number of them."""
    from tqdm.auto import tqdm
    tasks = [(texts[start : start + CHUNK], name, model) for start in range(0, len(texts), CHUNK)]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    vocabulary, ids, lengths = {}, [], []
    with contextlib.ExitStack() as stack:
        parts = map(analyse, tasks)
        if len(tasks) > 1 and cores > 1:
            parts = stack.enter_context(multiprocessing.Pool(min(cores, len(tasks)), watch_parent)).imap(analyse, tasks)
        bar = stack.enter_context(tqdm(desc="analyse", total=len(texts), unit=" abstracts"))
        for terms, part_ids, part_lengths in parts:
            number_of = np.array([vocabulary.setdefault(term, len(vocabulary)) for term in terms] or [0], np.int32)
            ids.append(number_of[part_ids])
            lengths.append(part_lengths)
            bar.update(len(part_lengths))
    return vocabulary, np.concatenate(ids), np.concatenate(lengths)

def bm25_postings(ids, lengths, terms, method, k1, b, delta=0.5):
    """bm25s's score matrix (Lu 2024): (data, indices, indptr, scores of absent terms), CSC, texts x terms, float32.

    By bm25s's own formulas, bit by bit; only its loop over texts in Python is one over blocks of postings here.
    The last is None but for bm25l and bm25+, where a term counts also for the texts that lack it.
    """
    from bm25s import scoring
    from scipy import sparse
    borders = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    counts = sparse.csr_matrix((np.ones(len(ids), np.float32), ids, borders), shape=(len(lengths), terms)).tocsc()
    counts.sum_duplicates()
    data, indices, indptr = counts.data, counts.indices, counts.indptr.astype(np.int64)
    frequencies = np.diff(indptr)
    mean = lengths.astype(np.int64).mean()
    of_term = dict(enumerate(frequencies.tolist()))
    idf = scoring._build_idf_array(of_term, len(lengths), scoring._select_idf_scorer(method), "float32")
    absent, tfc = None, scoring._select_tfc_scorer(method)
    if method in ("bm25l", "bm25+"):
        absent = scoring._build_nonoccurrence_array(of_term, len(lengths), scoring._select_idf_scorer(method), tfc,
                                                    mean, mean, k1, b, delta, "float32")
    term_of = np.repeat(np.arange(terms, dtype=np.int32), frequencies)
    for start in range(0, len(data), POSTINGS):
        part = slice(start, start + POSTINGS)
        term, length = term_of[part], lengths[indices[part]].astype(np.int64)
        scores = idf[term] * tfc(tf_array=data[part], l_d=length, l_avg=mean, k1=k1, b=b, delta=delta)
        data[part] = scores if absent is None else scores - absent[term]
    return data, indices, indptr, absent

def index_bm25(texts, folder, model, args, shards):
    """BM25 postings (Robertson & Zaragoza 2009, in the variant --bm25-method), saved by bm25s itself."""
    import bm25s
    vocabulary, ids, lengths = analyse_all(texts, args.analyser, args.spacy_model)
    if not vocabulary:
        fail(args.corpus, "no abstract has a word that is no stopword; leave bm25 out of --indexes")
    bm25 = bm25s.BM25(method=args.bm25_method, k1=args.k1, b=args.b)
    *parts, absent = bm25_postings(ids, lengths, len(vocabulary), args.bm25_method, args.k1, args.b, bm25.delta)
    bm25.scores = dict(zip(("data", "indices", "indptr"), parts)) | {"num_docs": len(texts)}
    bm25.vocab_dict, bm25.nonoccurrence_array = vocabulary, absent
    bm25.save(folder, show_progress=False)
    analyser = {"name": args.analyser} | ({"model": args.spacy_model} if args.analyser == "spacy" else {})
    return {"analyser": analyser, "method": args.bm25_method, "k1": args.k1, "b": args.b, "terms": len(vocabulary),
            "postings": len(parts[0]), "empty": int((lengths == 0).sum())}

# ----------------------------------------------------------- Dense
def pool_windows(vectors):
    """One vector from those of a text's windows: (mean + max) / 2 (AIRwaves 2025, eq. 3); of one window, itself."""
    return (vectors.mean(axis=0) + vectors.max(axis=0)) / 2

def embed_windows(encoder, texts, budget, update):
    """(texts, dimensions) float32: each text in windows as long as the model takes them, pooled to one vector."""
    import torch
    from sentence_transformers.util import batch_to_device
    coded = encoder.tokenizer(texts, truncation=True, max_length=encoder.max_seq_length, stride=OVERLAP,
                              return_overflowing_tokens=True)
    windows, row_of = coded["input_ids"], np.array(coded["overflow_to_sample_mapping"])
    vectors = np.empty((len(windows), encoder.get_embedding_dimension()), np.float32)
    for rows in batches(np.array(list(map(len, windows))), budget):
        features = encoder.tokenizer.pad({"input_ids": [windows[row] for row in rows]}, return_tensors="pt")
        with torch.inference_mode():
            output = encoder.eval()(batch_to_device(dict(features), encoder.device))
        vectors[rows] = output["sentence_embedding"].float().cpu().numpy()
        update(np.isin(rows, np.flatnonzero(np.diff(row_of, prepend=-1))).sum())
    return np.stack([pool_windows(vectors[row_of == row]) for row in range(len(texts))])

def prompt_of(encoder, side, args):
    """What stands before every query or document (side): as given, else the model's own, else nothing."""
    given, names = {"query": (args.query_prompt, ("query",)),
                    "document": (args.document_prompt, ("document", "passage", "corpus"))}[side]
    return given if given is not None else next((encoder.prompts[name] for name in names if encoder.prompts.get(name)), "")

def embed(encoder, texts, prompt, pooling, budget, update):
    """(texts, dimensions) float32 of length 1, and how many texts were cut off at the model's limit."""
    lengths = token_lengths(encoder, [prompt + text for text in texts])
    if pooling == "chunks":
        cut, vectors = 0, embed_windows(encoder, [prompt + text for text in texts], budget, update)
    else:
        limit = encoder.max_seq_length or sys.maxsize
        cut, vectors = int((lengths > limit).sum()), np.empty((len(texts), encoder.get_embedding_dimension()), np.float32)
        for rows in batches(np.minimum(lengths, limit), budget):
            vectors[rows] = encoder.encode_document([texts[row] for row in rows], prompt=prompt, batch_size=len(rows))
            update(len(rows))
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12), cut

def index_dense(texts, folder, model, args, shards):
    """One unit vector a text, by any sentence-transformers model; float16 halves disk and memory at search."""
    encoder, dtype = load_encoder("dense", model, args.device, args.dtype, args.max_length)
    if args.pooling == "chunks" and (encoder.max_seq_length or sys.maxsize) <= OVERLAP + 2:
        fail(model, f"it reads {encoder.max_seq_length} tokens, and windows overlap by {OVERLAP}; take --pooling truncate")

    def make(start, stop, update):
        vectors, cut = embed(encoder, texts[start:stop], prompt, args.pooling, budget, update)
        return {"vectors": vectors.astype(np.float16), "cut": np.array(cut)}

    budget, prompt = budget_of("dense", encoder, args), prompt_of(encoder, "document", args)
    shape, truncated, row = (len(texts), encoder.get_embedding_dimension()), 0, 0
    vectors = np.lib.format.open_memmap(folder / "embeddings.npy", mode="w+", dtype=np.float16, shape=shape)
    for part in sharded(shards(), len(texts), args.shard_size, make, "dense"):
        vectors[row : row + len(part["vectors"])] = part["vectors"]
        row, truncated = row + len(part["vectors"]), truncated + int(part["cut"])
    vectors.flush()
    return {"shape": shape, "dtype": "float16", "computed_in": dtype, "pooling": args.pooling, "truncated": truncated,
            "max_length": encoder.max_seq_length, "query_prompt": args.query_prompt,
            "document_prompt": args.document_prompt, "device": str(encoder.device)}

# ----------------------------------------------------------- SPLADE
def keep_top_terms(weights, count):
    """weights (texts, terms) with all but the count largest of each row set to 0; equal ones in vocabulary order."""
    if count and count < weights.shape[1]:
        order = np.argsort(-weights, axis=1, kind="stable")
        np.put_along_axis(weights, order[:, count:], 0, axis=1)
    return weights

def index_splade(texts, folder, model, args, shards):
    """One sparse vector a text over the model's vocabulary; on the CPU as rows (CSR) by shard, then by term (CSC)."""
    from scipy import sparse
    encoder, dtype = load_encoder("splade", model, args.device, args.dtype, args.max_length)

    def make(start, stop, update):
        lengths, limit = token_lengths(encoder, texts[start:stop]), encoder.max_seq_length or sys.maxsize
        found, order = [], []
        for rows in batches(np.minimum(lengths, limit), budget):
            batch = [texts[start + row] for row in rows]
            weights = keep_top_terms(sparse_vectors(encoder, batch, args.activation, "document"), args.top_terms)
            found.append(sparse.csr_matrix(weights))
            order += rows
            update(len(rows))
        matrix = sparse.vstack(found, format="csr")[np.argsort(order)]
        return {"data": matrix.data, "indices": matrix.indices.astype(np.int32), "indptr": matrix.indptr.astype(np.int64),
                "terms": np.array(matrix.shape[1]), "cut": np.array((lengths > limit).sum())}

    budget = budget_of("splade", encoder, args)
    parts = list(sharded(shards(), len(texts), args.shard_size, make, "splade"))
    matrix = sparse.vstack([sparse.csr_matrix((part["data"], part["indices"], part["indptr"]),
                                              (len(part["indptr"]) - 1, int(part["terms"]))) for part in parts]).tocsc()
    for name in ("data", "indices", "indptr"):
        np.save(folder / f"{name}.npy", getattr(matrix, name))
    return {"shape": matrix.shape, "nonzero": int(matrix.nnz), "dtype": str(matrix.dtype), "computed_in": dtype,
            "activation": args.activation, "top_terms": args.top_terms, "max_length": encoder.max_seq_length,
            "truncated": sum(int(part["cut"]) for part in parts), "device": str(encoder.device)}

INDEXERS = {"bm25": index_bm25, "dense": index_dense, "splade": index_splade}
ENCODED = {"max_length", "batch_tokens", "shard_size", "dtype", "query_prompt", "document_prompt"}
FLAGS = {  # those that change an index
    "bm25": {"analyser", "spacy_model", "bm25_method", "k1", "b"},
    "dense": {"dense_model", "pooling"} | ENCODED,
    "splade": {"splade_model", "activation", "top_terms"} | ENCODED,
}

def arguments_of(kind, args):
    """The arguments that decide what one index holds: another --k1 must not throw away hours of encoding."""
    others = {"indexes", "split"}.union(*FLAGS.values()) - FLAGS[kind]
    return argparse.Namespace(**{name: value for name, value in vars(args).items() if name not in others})

def index(args):
    """Build those of the indexes that are asked for and not up to date."""
    if args.k1 < 0 or not 0 <= args.b <= 1:
        fail("--k1, --b", f"k1 {args.k1} and b {args.b}: k1 is 0 or more, b between 0 and 1")
    if args.pooling == "chunks" and args.max_length <= OVERLAP + 2:
        fail("--max-length", f"windows of {args.max_length} tokens cannot overlap by {OVERLAP}; give more, or truncate")
    models = {"dense": args.dense_model, "splade": args.splade_model}
    models = {kind: model_folder(models[kind]) if kind in models else None for kind in args.indexes}
    inputs = {kind: fingerprints(args.corpus, *filter(None, [models[kind]])) for kind in args.indexes}
    folders = {kind: Path(args.out) / kind for kind in args.indexes}
    own = {kind: arguments_of(kind, args) for kind in args.indexes}
    todo = [kind for kind in INDEXERS if kind in args.indexes and not up_to_date([folders[kind]], own[kind], inputs[kind])]
    if not todo:
        return {"made": [], "abstracts": None}
    if "bm25" in todo:
        ANALYSERS[args.analyser](args.spacy_model)  # fails here, in time, when spaCy is not there
    texts = read_texts(args)
    ids, texts = json.dumps(list(texts), ensure_ascii=False), list(texts.values())
    for kind in todo:
        shards = functools.partial(workplace, Path(f"{folders[kind]}.parts"), own[kind], inputs[kind])
        with written(folders[kind], own[kind], inputs[kind], seed=args.seed) as folder:
            folder.mkdir()
            facts = {"kind": kind, "corpus": inputs[kind][Path(args.corpus).as_posix()], "abstracts": len(texts),
                     "fields": args.fields, "separator": args.separator}
            if models[kind]:
                facts |= {"model": models[kind].as_posix(), "model_sha256": inputs[kind][models[kind].as_posix()]}
            facts |= INDEXERS[kind](texts, folder, models[kind], args, shards)
            (folder / "abstract_ids.json").write_text(ids, encoding="utf-8")
            (folder / "meta.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        remove(f"{folders[kind]}.parts")
        print(f"{folders[kind]}: {len(texts)} abstracts, {facts.get('truncated', 0)} of them truncated")
    return {"made": [str(folders[kind]) for kind in todo], "abstracts": len(texts)}

# ----------------------------------------------------------- Graph
def nearest(scores, k):
    """(rows (m, k), scores (m, k)) of the k best of each row of scores (m, n), a tensor; equal scores by row number."""
    found, rows = (part.cpu().numpy() for part in scores.topk(min(k + 1, scores.shape[1])))
    for line in np.flatnonzero(found[:, k - 1] == found[:, -1] if found.shape[1] > k else []):
        exact = scores[line].cpu().numpy()  # a tie across the cut: which of them topk takes is open
        rows[line, :k] = np.argsort(-exact, kind="stable")[:k]
        found[line, :k] = exact[rows[line, :k]]
    found, rows = found[:, :k], rows[:, :k]
    order = np.lexsort((rows, -found))
    return np.take_along_axis(rows, order, 1), np.take_along_axis(found, order, 1)

def graph(args):
    """The k nearest neighbours of every abstract by cosine, exact: all rows against all rows, a block at a time."""
    source = Path(args.index)
    try:
        meta = json.loads((source / "meta.json").read_text(encoding="utf-8"))
        vectors = np.load(source / "embeddings.npy", mmap_mode="c")
    except (OSError, ValueError):
        fail(source, "no dense index; build it with 01_index.py --indexes dense")
    inputs = fingerprints(source)
    if up_to_date([args.out], args, inputs):
        return {"made": []}
    count, k = len(vectors), min(args.neighbours, len(vectors) - 1)
    if k < 1:
        fail(source, "a single abstract has no neighbours; index two or more")
    with ticking("loading torch"):
        import torch
    device = device_of(args.device)
    height = args.rows or ROWS["cpu" if device == "cpu" else "cuda"]

    def rows_of(start, stop):
        return torch.from_numpy(vectors[start:stop]).to(device).float()

    def make(start, stop, update):
        found = []
        for top in range(start, stop, height):
            queries = rows_of(top, min(top + height, stop))
            scores = torch.empty((len(queries), count), device=device)
            for left in range(0, count, BLOCK):
                scores[:, left : left + BLOCK] = queries @ rows_of(left, left + BLOCK).T
            own = torch.arange(len(queries), device=device)
            scores[own, top + own] = -torch.inf  # nobody is their own neighbour
            found.append(nearest(scores, k))
            update(len(queries))
        neighbours, similarities = map(np.concatenate, zip(*found))
        return {"neighbours": neighbours.astype(np.int32), "similarities": similarities.astype(np.float32)}

    parts = workplace(Path(f"{args.out}.parts"), args, inputs)
    with written(args.out, args, inputs, device=device) as folder, torch.inference_mode():
        folder.mkdir()
        shards = list(sharded(parts, count, SHARD, make, "graph"))
        for name in ("neighbours", "similarities"):
            np.save(folder / f"{name}.npy", np.concatenate([part[name] for part in shards]))
        shutil.copy(source / "abstract_ids.json", folder)
        facts = {name: meta[name] for name in ("corpus", "abstracts", "model", "model_sha256")}
        facts = {"kind": "graph", "neighbours": k, "similarity": "cosine", "dense": inputs[source.as_posix()]} | facts
        (folder / "meta.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    remove(parts)
    print(f"{args.out}: {k} neighbours of {count} abstracts")
    return {"made": [args.out], "abstracts": count, "neighbours": k}

# ----------------------------------------------------------- Train
def triplets(qrels):
    """[{claim_id, positive, negatives: [one]}]: every SUPPORTS or REFUTES with every NEI of the same claim."""
    return [{"claim_id": claim, "positive": positive, "negatives": [negative]}
            for claim, rows in qrels.groupby("claim_id", sort=False)
            for positive in rows["abstract_id"][rows["label"] != "NEI"]
            for negative in rows["abstract_id"][rows["label"] == "NEI"]]

def with_negatives(qrels, ranked, count, end):
    """[{claim_id, positive, negatives: [count]}]: each positive with the top or the bottom (end) of its claim's
    ranking, {claim_id: [abstract_id, best first]}, without what is judged relevant. A claim with fewer is left out.
    """
    examples = []
    for claim, rows in qrels.groupby("claim_id", sort=False):
        positives = list(rows["abstract_id"][rows["label"] != "NEI"])
        rest = [name for name in ranked.get(claim, []) if name not in positives]
        negatives = rest[:count] if end == "top" else rest[len(rest) - count :]
        if len(rest) >= count:
            examples += [{"claim_id": claim, "positive": name, "negatives": negatives} for name in positives]
    return examples

def own_ranking(encoder, claims, texts, parts, args):
    """{claim_id: [abstract_id, best first]} by the encoder as it is before training: the --depth best, or the worst where
    negatives come from the bottom. parts: a folder for the vectors, from which a restart goes on."""
    def make(start, stop, update):
        return {"vectors": embed(encoder, every[start:stop], prompt, "truncate", budget, update)[0]}

    names, every = np.array(list(texts), dtype=object), list(texts.values())
    budget, prompt = budget_of("dense", encoder, args), prompt_of(encoder, "document", args)
    parts.mkdir(exist_ok=True)
    vectors = np.concatenate([part["vectors"] for part in sharded(parts, len(every), SHARD, make, "mine")])
    queries = encoder.encode_query(list(claims.values()), prompt=args.query_prompt, normalize_embeddings=True)
    end = slice(args.depth) if args.negatives_from == "top" else slice(-args.depth, None)
    return {claim: list(names[np.argsort(-(vectors @ query), kind="stable")[end]])
            for claim, query in zip(claims, queries)}

def dev_evaluator(args, texts, rng):
    """nDCG@10 of the dev claims over their judged abstracts and --dev-pool others; None where there is no dev split."""
    paths = {name: Path(args.data) / f"{name}.{args.dev_split}.tsv" for name in ("claims", "qrels")}
    if not args.dev_split or not paths["qrels"].exists():
        print("no dev split: the model of the last epoch is kept")
        return None
    from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator
    claims = read_table(paths["claims"], ["claim_id", "claim"])
    qrels = read_table(paths["qrels"], ["claim_id", "abstract_id", "label"], claim_id=claims["claim_id"], abstract_id=texts)
    relevant = {claim: set(rows["abstract_id"]) for claim, rows in qrels[qrels["label"] != "NEI"].groupby("claim_id")}
    names = list(texts)
    pool = set(qrels["abstract_id"]) | {names[row] for row in rng.permutation(len(names))[: args.dev_pool]}
    queries = {claim: text for claim, text in zip(claims["claim_id"], claims["claim"]) if claim in relevant}
    return InformationRetrievalEvaluator(
        queries, {name: texts[name] for name in names if name in pool}, relevant, name="dev", ndcg_at_k=[10],
        write_csv=False, query_prompt=args.query_prompt, corpus_prompt=args.document_prompt)

def fit(encoder, columns, evaluator, folder, args):
    """Train on columns {claim, positive, negative_1, ...: texts}; the best epoch on dev is kept. Returns dev's nDCG@10,
    before training and after every epoch."""
    from datasets import Dataset
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
    from sentence_transformers.sentence_transformer import losses
    from transformers import EarlyStoppingCallback
    if args.loss == "triplet":
        loss = losses.TripletLoss(encoder, losses.TripletDistanceMetric.COSINE, args.margin)
    else:
        loss = losses.MultipleNegativesRankingLoss(encoder, scale=args.scale)
    prompts = {name: prompt_of(encoder, "query" if name == "claim" else "document", args) for name in columns}
    precision, best = precision_of(encoder.device), "eval_dev_cosine_ndcg@10"
    watched = {"eval_strategy": "epoch", "eval_on_start": not last_checkpoint(folder), "load_best_model_at_end": True,
               "metric_for_best_model": best, "greater_is_better": True} if evaluator else {}
    how = SentenceTransformerTrainingArguments(
        output_dir=str(folder), num_train_epochs=args.epochs, per_device_train_batch_size=args.batch_size,
        gradient_accumulation_steps=args.accumulate, learning_rate=args.lr, warmup_steps=WARMUP,
        bf16=precision == "bf16", fp16=precision == "fp16", restore_callback_states_from_checkpoint=True,
        activation_checkpointing=args.gradient_checkpointing, use_cpu=encoder.device.type == "cpu",
        batch_sampler="no_duplicates" if args.loss == "mnrl" else "batch_sampler",  # a claim's other evidence is no negative
        prompts={name: prompt for name, prompt in prompts.items() if prompt} or None, seed=args.seed, data_seed=args.seed,
        save_strategy="epoch", save_total_limit=2, logging_strategy="epoch", report_to="none", disable_tqdm=False,
        dataloader_pin_memory=False, **watched)
    trainer = SentenceTransformerTrainer(
        encoder, how, Dataset.from_dict(columns), loss=loss, evaluator=evaluator,
        callbacks=[EarlyStoppingCallback(args.patience)] if evaluator else [])
    trainer.train(resume_from_checkpoint=resume(folder, how))
    return [value for _, value in sorted({line["step"]: round(line[best], 4) for line in trainer.state.log_history
                                          if best in line}.items())]

def load_learner(model, args):
    """An encoder that is cut to --max-length while it learns, and the length that it reads by itself, to save it with."""
    encoder, _ = load_encoder("dense", model, args.device, "fp32")
    own_length = encoder.max_seq_length
    encoder.max_seq_length = min(args.max_length, own_length or args.max_length)
    return encoder, own_length

def train(args):
    """Fine-tune the dense encoder on the judged pairs of one split."""
    for name, value in LOSSES[args.loss].items():
        setattr(args, name, value if getattr(args, name) is None else getattr(args, name))
    if args.hard_negatives and args.loss == "triplet":
        fail("--hard-negatives", "belongs to --loss mnrl; the negatives of --loss triplet are those judged NEI")
    one_gpu(args)
    model = model_folder(args.model)
    optional = [Path(args.data) / f"{name}.{args.dev_split}.tsv" for name in ("claims", "qrels")]
    optional = [path for path in optional if path.exists()] + ([args.negatives_run] if args.negatives_run else [])
    inputs = fingerprints(args.corpus, args.claims, args.qrels, model, *optional)
    examples_path = f"{args.out}.examples.jsonl"
    if up_to_date([args.out, examples_path], args, inputs):
        return {"made": []}
    texts = read_texts(args)
    claims = read_table(args.claims, ["claim_id", "claim"])
    claims = dict(zip(claims["claim_id"], claims["claim"]))
    qrels = read_table(args.qrels, ["claim_id", "abstract_id", "label"], claim_id=claims, abstract_id=texts)
    ranked = {}
    if args.negatives_run:
        run = read_table(args.negatives_run, ["claim_id", "abstract_id", "rank", "score"], abstract_id=texts)
        ranked = {claim: list(rows["abstract_id"])[: args.depth] for claim, rows in run.groupby("claim_id", sort=False)}
    encoder, parts = None, Path(f"{args.out}.parts")
    if args.hard_negatives and not args.negatives_run:
        encoder, own_length = load_learner(model, args)
        judged = {claim: claims[claim] for claim in dict.fromkeys(qrels["claim_id"])}
        ranked = own_ranking(encoder, judged, texts, workplace(parts, args, inputs) / "vectors", args)
    examples = (triplets(qrels) if args.loss == "triplet" else
                with_negatives(qrels, ranked, args.hard_negatives, args.negatives_from))
    if not examples:
        remove(parts)
        fail(args.qrels, f"no claim has what --loss {args.loss} needs; take another split, loss or run of negatives")
    left_out = qrels["claim_id"].nunique() - len({example["claim_id"] for example in examples})
    print(f"{len(examples)} examples, {left_out} claims without one")
    columns = {"claim": [claims[example["claim_id"]] for example in examples],
               "positive": [texts[example["positive"]] for example in examples]}
    for place in range(len(examples[0]["negatives"])):
        columns[f"negative_{place + 1}"] = [texts[example["negatives"][place]] for example in examples]
    if not encoder:
        encoder, own_length = load_learner(model, args)
    evaluator = dev_evaluator(args, texts, np.random.default_rng(args.seed))
    facts = {"seed": args.seed, "device": str(encoder.device), "examples": len(examples), "claims_left_out": left_out}
    facts["dev_ndcg_at_10"] = curve = fit(encoder, columns, evaluator, workplace(parts, args, inputs), args)
    if curve and curve[0] > max(curve[1:]):
        print(f"warning: nDCG@10 on dev was {curve[0]} before training and {max(curve[1:])} at best after", file=sys.stderr)
    encoder.prompts |= {name: prompt for name, prompt in (("query", args.query_prompt), ("document", args.document_prompt))
                        if prompt is not None}
    with written(examples_path, args, inputs, **facts) as temporary:
        lines = [json.dumps(example, ensure_ascii=False) + "\n" for example in examples]
        temporary.write_text("".join(lines), encoding="utf-8")
    encoder.max_seq_length = own_length
    with written(args.out, args, inputs, **facts) as temporary:
        encoder.save_pretrained(str(temporary), create_model_card=False)
    remove(parts)
    return {"made": [args.out, examples_path], **facts}

# ----------------------------------------------------------- Main
def text_flags(add):
    add("--corpus", "--in", default="{data}/corpus.jsonl", help="the abstracts, one JSON object a line")
    add("--fields", default="title,abstract", help="fields of a record that are read, in order: title,abstract,authors,...")
    add("--separator", default=" ", help="stands between two fields, as ' [SEP] '")
    add("--max-length", type=at_least(1), default=512, help="tokens kept of a text, if the model takes as many")
    add("--batch-tokens", type=at_least(0), default=0, help="tokens encoded at once; 0 takes what suits the device")
    add("--query-prompt", help="put before every claim, as 'query: '; without it, the model's own")
    add("--document-prompt", help="put before every abstract, as 'passage: '; without it, the model's own")

def index_flags(add):
    text_flags(add)
    add("--out", default="{work}/index", help="folder that gets one folder an index")
    add("--indexes", nargs="+", choices=INDEXERS, default=list(INDEXERS), help="which to build")
    add("--analyser", choices=ANALYSERS, default="default", help="BM25: how texts become terms; 02 does the same to claims")
    add("--spacy-model", default="en_core_web_sm", help="pipeline of --analyser spacy, name or folder")
    add("--bm25-method", choices=BM25_METHODS, default="lucene", help="variant of the formula")
    add("--k1", type=float, default=1.5, help="BM25: how soon more occurrences of a term stop to count")
    add("--b", type=float, default=0.75, help="BM25: how much long abstracts are held back")
    add("--dense-model", default="data/models/minilm", help="sentence-transformers folder or hub id")
    add("--pooling", choices=("truncate", "chunks"), default="truncate",
        help="long texts: cut off, or in windows that overlap by 50 tokens, mean and max of their vectors averaged")
    add("--splade-model", default="data/models/splade-tiny", help="SparseEncoder or masked language model, folder or hub id")
    add("--activation", choices=ACTIVATIONS, default="log1p_relu", help="SPLADE: from logit to weight")
    add("--top-terms", type=at_least(0), default=0, help="SPLADE: terms kept a text, the heaviest; 0 keeps all")
    add("--shard-size", type=at_least(1), default=SHARD, help="abstracts encoded between two points to restart from")
    add("--dtype", choices=("auto", "fp32", "fp16", "bf16"), default="auto", help="auto: bf16 on a GPU, else fp32")

def graph_flags(add):
    add("--index", "--in", default="{work}/index/dense", help="the dense index")
    add("--out", default="{work}/index/graph", help="folder of the graph")
    add("--neighbours", type=at_least(1), default=NEIGHBOURS, help="neighbours kept an abstract")
    add("--rows", type=at_least(0), default=0, help="abstracts compared at once; 0 takes what suits the device")

def train_flags(add):
    text_flags(add)
    add("--claims", default="{data}/claims.{split}.tsv", help="the claims")
    add("--qrels", default="{data}/qrels.{split}.tsv", help="the judged pairs")
    add("--model", default="data/models/minilm", help="where to start: sentence-transformers folder or hub id")
    add("--out", default="{work}/models/encoder", help="folder of the trained model")
    add("--loss", choices=LOSSES, default="mnrl", help="triplet: NEI as negatives; mnrl: the batch's other abstracts")
    add("--margin", type=float, default=MARGIN, help="triplet: by how much the positive should be nearer, in cosine")
    add("--scale", type=float, default=SCALE, help="mnrl: factor of the cosine, 1 / temperature")
    add("--hard-negatives", type=at_least(0), default=0, help="mnrl: further negatives an example")
    add("--negatives-run", help="the run that they come from; without it, the ranking by the model before training")
    add("--negatives-from", choices=("top", "bottom"), default="top", help="which end of that ranking")
    add("--depth", type=at_least(1), default=100, help="how many abstracts of that end are looked at")
    add("--epochs", type=float, help="passes over the examples; triplet 3, mnrl 2")
    add("--lr", type=float, help="learning rate, warm-up over 10 %% of the steps; triplet 5e-5, mnrl 7e-6")
    add("--batch-size", type=at_least(1), help="examples at once; triplet 32, mnrl 64")
    add("--accumulate", type=at_least(1), help="batches a step; triplet 2, mnrl 1")
    add("--gradient-checkpointing", action="store_true", help="less memory, a third more time")
    add("--dev-split", default="dev", help="where there is one, the best epoch on it is kept")
    add("--dev-pool", type=at_least(0), default=10_000, help="abstracts ranked beside dev's judged ones")
    add("--patience", type=at_least(1), default=2, help="epochs without a gain on dev before training stops")

def main():
    run_job(__doc__, {"index": (index, index_flags), "graph": (graph, graph_flags), "train": (train, train_flags)})

if __name__ == "__main__":
    main()
