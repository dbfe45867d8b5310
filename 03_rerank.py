# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "accelerate==1.15.0",
#     "datasets==5.2.0",
#     "numpy==2.4.6",
#     "pandas==3.1.1",
#     "protobuf==7.36.2",
#     "sentence-transformers==6.2.0",
#     "sentencepiece==0.2.3",
#     "torch==2.13.0",
#     "tqdm==4.70.1",
#     "transformers==5.23.0",
# ]
# ///
"""
Rerank the candidates of a run with cross-encoders, or train one.

Reads   work/NAME/SPLIT/hybrid.tsv, data/NAME/claims.SPLIT.tsv, data/NAME/corpus.jsonl
        --graph: index/graph/ (01_index.py); --verdicts: verdicts.tsv (05_classify.py)
        train: work/NAME/SPLIT/examples.jsonl (02_retrieve.py mine), and the dev split, if any
Writes  work/NAME/SPLIT/rerank.tsv; of several models rerank.1.tsv, rerank.2.tsv, and their RRF
        train: work/NAME/models/reranker/
        OUT.parts/ holds finished groups and checkpoints; an interrupted run resumes from them.
Prints  one line of JSON, last on stdout

Examples
    python 02_retrieve.py mine && python 03_rerank.py train
    python 03_rerank.py --depth 50 --first-stage 0.5
    python 03_rerank.py --model BAAI/bge-reranker-large BAAI/bge-reranker-v2-m3 --depth 200
    python 03_rerank.py --model Qwen/Qwen3-Reranker-0.6B --device cuda:0 cuda:1
    python 03_rerank.py --graph work/demo/index/graph --top-k 10
    python 03_rerank.py train --loss margin --margin 0.25 --batch-size 8
"""
import argparse
import atexit
import contextlib
import csv
import functools
import hashlib
import json
import os
import resource
import shutil
import sys
import time
import zlib
from pathlib import Path

import numpy as np

KEY = ["claim_id", "abstract_id"]
GROUP = 1024                           # pairs, in whole claims, that are scored and stored at once
RRF_K = 60                             # Cormack et al. 2009
ROUNDS, NEIGHBOURS, BEAM = 20, 10, 30  # AlexUNLP-FMT 2025
MONO_T5 = "Query: {} Document: {} Relevant:"  # Nogueira et al. 2020; it answers true or false
WEIGHT_DECAY = 0.01                    # Kiepura & Lam 2025
LOSSES = {"bce": "BinaryCrossEntropyLoss", "margin": "MarginMSELoss", "mse": "MSELoss",
          "l1": "MSELoss", "lambda": "LambdaLoss", "listnet": "ListNetLoss",
          "ranknet": "RankNetLoss", "mnrl": "MultipleNegativesRankingLoss"}
TUPLES = ("margin", "mnrl")            # losses that need tuples; the others read pairs, too
MEASURE = "eval_dev_ndcg@10"           # decides on the best epoch

# --- helpers (same in all six scripts)
LABELS = ("SUPPORTS", "REFUTES", "NEI")
RUN = ["claim_id", "abstract_id", "rank", "score"]

def fail(where, what):
    """Bad input or usage: one line on stderr, exit status 2."""
    line = " ".join(f"error: {where}: {what}".split())
    print("".join(c if c.isprintable() else "?" for c in line), file=sys.stderr)
    sys.exit(2)

def read_table(path, columns, **known):
    """Read a TSV file with a header as strings, a run by claim and rank, rank and score as numbers.

    known: the values that a column may hold. The first bad row ends the script, with its line.
    """
    import pandas as pd
    rows, line = [], 1
    try:
        with open(path, encoding="utf-8-sig", errors="replace", newline="") as file:
            reader = csv.reader(file, delimiter="\t", strict=True)
            header = next(reader, [])
            line = reader.line_num + 1
            for row in reader:
                if any(row) and len(row) != len(header):
                    raise csv.Error(f"{len(row)} fields, not {len(header)}")
                if any("\t" in field and "\n" in field for field in row):
                    raise csv.Error("a quotation mark is not closed")
                if any(row):
                    rows.append([line, *row])
                line = reader.line_num + 1
    except csv.Error as error:
        fail(f"{path}:{line}", f"{error}; check its quotation marks; see 06_evaluate.py convert")
    if not set(columns) <= set(header) or len(set(header)) < len(header):
        fail(f"{path}:1", f"columns {header}, wanted {columns}; see 06_evaluate.py convert")
    table = pd.DataFrame(rows, columns=[0, *header]).set_index(0).astype(str)
    ids = [column for column in columns if column.endswith("_id")]
    bad = {f"{column} is empty": table[column].str.strip() == "" for column in columns}
    bad |= {f"unknown {column}": ~table[column].isin(known[column]) for column in known}
    bad["there is an earlier row for this"] = table.duplicated(ids)
    if "rank" in columns:
        claim = table["claim_id"].factorize()[0]
        for column in ("rank", "score"):
            table[column] = pd.to_numeric(table[column], errors="coerce").astype(float)
        bad["score is not a finite number"] = ~np.isfinite(table["score"])
        bad["ranks are not 1, 2, 3"] = table["rank"] != table.groupby(claim)["rank"].rank("first")
    for what, rows in bad.items():
        if rows.any():
            line = rows.idxmax()
            fail(f"{path}:{line}", f"{what}: {' '.join(table.loc[line, ids])}; fix the row")
    if "rank" in columns:
        table = table.iloc[np.lexsort((table["rank"], claim))].astype({"rank": int})
    return table.reset_index(drop=True)

def read_corpus(path):
    """Read {abstract_id: record} in file order; an abstract that is not a text becomes ""."""
    corpus, empty = {}, 0
    with open(path, encoding="utf-8-sig", errors="replace") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
                if "\\ud" in line.lower():  # lone surrogates become U+FFFD
                    text = json.dumps(record, ensure_ascii=False).encode("utf-16", "surrogatepass")
                    record = json.loads(text.decode("utf-16", "replace"))
                name, text = str(record["abstract_id"]), record.get("abstract")
            except (ValueError, KeyError, TypeError, RecursionError):
                fail(f"{path}:{number}", "not a JSON object with an abstract_id; fix the line")
            if not name.strip() or name in corpus:
                fail(f"{path}:{number}", f"abstract_id {name!r} is empty or not unique; fix it")
            corpus[name] = record | {"abstract": text if isinstance(text, str) else ""}
            empty += not corpus[name]["abstract"].strip()
    if empty:
        print(f"warning: {path}: {empty} abstracts without text, kept as empty", file=sys.stderr)
    return corpus
# --- end of helpers

# --- helpers for outputs (same in all six scripts)
NEUTRAL = {"force", "out", "device", "batch_size", "concurrency"}  # no byte depends on these
PACKAGES = ("numpy", "pandas", "torch", "transformers", "sentence_transformers", "bm25s", "openai")
START, LOCKS = time.monotonic(), []

def sha256_of(*paths, models=()):
    """Return {path: sha256} of files, indexes (meta.json), models (config.json, else name)."""
    prints = {}
    for path in map(Path, (*paths, *models)):
        marks = [path / "meta.json", Path(f"{path}.meta.json"), path / "config.json"]
        mark = path if path.is_file() else next(filter(Path.is_file, marks), os.devnull)
        if mark == os.devnull and str(path) not in map(str, models):
            fail(path, "no such file or index; make it with the script before this one")
        with open(mark, "rb") as file:
            prints[str(path)] = hashlib.file_digest(file, "sha256").hexdigest()
    return prints

def task_of(args, inputs):
    """Return what decides the bytes of an output: arguments and inputs."""
    arguments = {name: value for name, value in vars(args).items() if name not in NEUTRAL}
    return json.loads(json.dumps({"arguments": arguments, "inputs": inputs}))

def up_to_date(paths, args, inputs):
    """Return whether this very task made all paths. Locks them until this process ends."""
    from filelock import FileLock, Timeout
    task, read = task_of(args, inputs), {Path(path).resolve() for path in inputs}
    same = not args.force
    for path in map(Path, paths):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock, meta = FileLock(f"{path}.lock"), Path(f"{path}.meta.json")
        try:
            LOCKS.append(lock.acquire(timeout=0))
        except Timeout:
            fail(path, "another command is making it; wait until that one ends")
        atexit.register(Path(lock.lock_file).unlink, missing_ok=True)
        made = {}
        with contextlib.suppress(OSError, ValueError):
            made = json.loads(meta.read_bytes())
        ours = made.get("arguments", {}).get("job") == args.job
        if path.resolve() in read or (path.is_dir() and any(path.iterdir()) and not ours):
            fail(path, "this command reads it, or did not make it; give another --out")
        same = same and path.exists() and task.items() <= made.items()
    for path in paths if same else ():
        remove(f"{path}.parts")  # left by a process that was killed at its very end
        print(f"up to date: {path}")
    return same

@contextlib.contextmanager
def written(path, args, inputs, **facts):
    """Yield a temporary path. What is made there becomes path, whole, with its provenance."""
    path, new, old = (Path(f"{path}{end}") for end in ("", ".tmp", ".tmp.old"))
    meta, new_meta = Path(f"{path}.meta.json"), Path(f"{new}.meta.json")
    remove(new, old)
    try:
        yield new
        modules = {name: sys.modules[name].__version__ for name in PACKAGES if name in sys.modules}
        made = task_of(args, inputs) | {"command": sys.argv, "packages": modules} | facts | spent()
        new_meta.write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        meta.unlink(missing_ok=True)  # it would vouch for other bytes
        if path.is_dir():
            path.rename(old)
        new.rename(path)
        new_meta.rename(meta)
    finally:
        remove(new, new_meta, old)

def remove(*paths):
    """Delete files and folders, where they exist."""
    for path in map(Path, paths):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)

def spent():
    """Return seconds and peak memory (MiB) of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak //= 1024 if sys.platform == "linux" else 1024**2
    return {"seconds": round(time.monotonic() - START, 1), "peak_mib": peak}
# --- end of helpers for outputs

# --- command line (same in all six scripts)
if not sys.stderr.isatty():  # tqdm prints a plain line every ten seconds
    os.environ.setdefault("TQDM_MININTERVAL", "10")
    os.environ.setdefault("TQDM_BAR_FORMAT", "{desc}: {n_fmt}/{total_fmt} [{elapsed}]\n")

class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """The docstring as it stands, and every default."""

def command_line(*jobs):
    """Return (parser, shared flags, words behind the job: the first word, by default jobs[0])."""
    words = sys.argv[1:]
    job = words.pop(0) if words and words[0] in jobs else jobs[0]
    parser = argparse.ArgumentParser(
        description=sys.modules["__main__"].__doc__, formatter_class=Help, usage=argparse.SUPPRESS,
        allow_abbrev=False)
    parser.error = lambda message: fail(Path(sys.argv[0]).name, f"{message}; see --help")
    parser.set_defaults(job=job)
    add = parser.add_argument
    add("--data", default="data/demo", help="folder of corpus, claims and qrels")
    add("--work", default="work/demo", help="folder of everything made from them")
    add("--split", default="train" if job in ("train", "mine") else "test", help="which claims")
    add("--seed", type=int, default=13, help="of every random choice")
    add("--device", nargs="+", default=["auto"], help="cpu, cuda, mps, or several: cuda:0 cuda:1")
    add("--force", action="store_true", help="make outputs again that are up to date")
    shared, _ = parser.parse_known_args([word for word in words if word not in ("-h", "--help")])
    return parser, shared, words

def finish(job, args):
    """Run the job and print its result as JSON; a fault of the disk is one line, Ctrl-C silence."""
    args.job = f"{Path(sys.argv[0]).name} {args.job}"
    try:
        print(json.dumps(job(args) | spent(), ensure_ascii=False))
    except KeyboardInterrupt:
        os._exit(130)  # without tearing libraries down, which takes seconds
    except OSError as error:
        fail(error.filename or args.job, f"{error.strerror or error}; check path, rights and space")
# --- end of command line

# --- models (same in 01, 02, 03 and 05)
def open_model(load, name, args, dtype="auto", **how):
    """Return load(name, ...), a sentence-transformers model; a bad one ends the script.

    dtype: fp32, bf16 or fp16; auto is fp32 on a CPU, and on a GPU bf16 where it has it, else fp16.
    """
    import torch
    device = None if args.device == ["auto"] else args.device[0]
    gpu = torch.cuda.is_available() if device is None else device.startswith("cuda")
    if dtype == "auto":
        dtype = ("bf16" if torch.cuda.is_bf16_supported(False) else "fp16") if gpu else "fp32"
    precision = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    print(f"loading {name}", file=sys.stderr)
    try:
        weights = {"dtype": precision, "use_safetensors": True}
        model = load(str(name), device=device, trust_remote_code=False, model_kwargs=weights, **how)
        words = len(model.tokenizer)
    except Exception as error:  # of many kinds: no such model, no network, no access, damaged files
        fail(name, f"cannot be loaded ({type(error).__name__}: {error}); see data/download.py")
    parts = [part for part in model.modules() if isinstance(part, torch.nn.Embedding)]
    sizes = [part.num_embeddings for part in parts]
    if sizes and not max(sizes) / 2 <= words <= max(sizes):
        fail(name, f"tokenizer of {words} entries, embeddings of {max(sizes)}; copy it whole")
    return model
# --- end of models

# ---------------------------------------------------------------- Arguments and inputs
def count(text):
    """A whole number from 1."""
    if int(text) < 1:
        raise ValueError
    return int(text)

def positive(text):
    """A finite number above 0."""
    if not 0 < float(text) < 1e9:
        raise ValueError
    return float(text)

def share(text):
    """A number from 0 to 1."""
    if not 0 <= float(text) <= 1:
        raise ValueError
    return float(text)

def read_claims(path):
    """Return {claim_id: claim}."""
    return dict(read_table(path, ["claim_id", "claim"])[["claim_id", "claim"]].values)

def read_texts(args):
    """Return {abstract_id: its fields, joined}."""
    texts = {}
    for name, record in read_corpus(args.corpus).items():
        parts = [str(record.get(field) or "") for field in args.fields.split(",")]
        texts[name] = args.separator.join(part for part in parts if part.strip())
    return texts

def read_stance(path, run):
    """Return P(SUPPORTS) + P(REFUTES) for each row of a run, from its verdicts."""
    import pandas as pd
    table = read_table(path, [*KEY, "p_supports", "p_refutes"])
    for name in ("p_supports", "p_refutes"):
        share = pd.to_numeric(table[name], errors="coerce")
        table[name] = share.where(share.between(0, 1))
    found = run.merge(table, on=KEY, how="left")
    stance = found["p_supports"] + found["p_refutes"]
    if stance.isna().any():
        claim, name = found.loc[stance.isna().idxmax(), KEY]
        fail(path, f"claim {claim}, abstract {name}: no p_supports and p_refutes from 0 to 1; make "
             "the verdicts of this run with 05_classify.py")
    return stance.to_numpy()

def read_graph(folder, corpus, neighbours):
    """Return {abstract_id: [neighbours, nearest first]}; corpus: sha256 of the corpus in use."""
    folder = Path(folder)
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        for name, mark in meta["files"].items():
            data = (folder / name).read_bytes()
            if mark != [len(data), zlib.crc32(data)]:
                raise ValueError(f"{name} is damaged")
        if meta["corpus"] != corpus:
            raise ValueError("made from another corpus")
        ids = json.loads((folder / "abstract_ids.json").read_text(encoding="utf-8"))
        rows = np.load(folder / "neighbours.npy")[:, :neighbours].tolist()
        return {name: [ids[place] for place in places] for name, places in zip(ids, rows)}
    except (OSError, ValueError, LookupError, TypeError) as error:
        fail(folder, f"no usable neighbour graph ({error}); 01_index.py graph --force makes it")

def parts_of(args, inputs):
    """Return OUT.parts/ for unfinished work; what another task left there is removed."""
    folder = Path(f"{args.out}.parts")
    mark, task = folder / "task.json", json.dumps(task_of(args, inputs))
    begun = mark.is_file() and mark.read_text(encoding="utf-8") == task
    if args.force or not begun:
        remove(folder)
        folder.mkdir(parents=True)
        mark.write_text(task, encoding="utf-8")
    return folder

# ---------------------------------------------------------------- Models
def load_reranker(name, train=False, **how):
    """Load a cross-encoder, a multi-vector model or monoT5, as the folder says."""
    from sentence_transformers import CrossEncoder, MultiVectorEncoder
    from sentence_transformers.util import load_file_path
    from transformers import AutoConfig
    config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    head = (config.architectures or ["no architecture"])[0].partition("For")[2]
    saved = load_file_path(name, "config_sentence_transformers.json")
    kind = json.loads(Path(saved).read_text(encoding="utf-8")).get("model_type") if saved else ""
    if head == "SequenceClassification" and config.num_labels != 1:
        fail(name, f"it has {config.num_labels} labels, a reranker has one; stance classifiers "
             "belong to 05_classify.py --model")
    plain = not saved and head in ("SequenceClassification", "CausalLM")
    if train or plain or kind == "CrossEncoder":
        return CrossEncoder(name, **how)
    if kind == "MultiVectorEncoder":
        return MultiVectorEncoder(name, **how)
    if head == "ConditionalGeneration":
        return load_mono_t5(name, **how)
    fail(name, f"no reranker, as it has no head; 03_rerank.py train --model {name} trains one")

def load_mono_t5(name, device, trust_remote_code, model_kwargs):
    """Load a sequence-to-sequence model, its tokenizer with it."""
    from sentence_transformers.util import get_device_name
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
    model = AutoModelForSeq2SeqLM.from_pretrained(name, trust_remote_code=False, **model_kwargs)
    model.tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    return model.to(device or get_device_name()).eval()

def truncated(pairs, used, tokenizer, limit):
    """Truncate abstracts, never claims, so that (claim, abstract) pairs fit in limit tokens.

    used: {claim: tokens of all but the abstract}. Returns the pairs and how many were truncated.
    """
    texts = list(dict.fromkeys(text for _, text in pairs))
    coded = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    spans, short, number = dict(zip(texts, coded["offset_mapping"])), [], 0
    for claim, text in pairs:
        room = limit - used[claim]
        if room < 1:
            fail("--max-length", f"{limit} tokens have no room beside the claim {claim!r:.60}")
        cut = len(spans[text]) > room
        short.append((claim, text[: spans[text][room - 1][1]] if cut else text))
        number += cut
    return short, number

def fitted(encoder, pairs, prompt):
    """Truncate the abstracts to what a cross-encoder reads beside claim and template."""
    claims = list(dict.fromkeys(claim for claim, _ in pairs))
    empty = encoder.preprocess([(claim, "") for claim in claims], prompt=prompt)
    # In a chat template, the first and last word may split into more tokens
    spare = 4 if "message" in encoder[0].modality_config else 0
    used = (empty["attention_mask"].sum(dim=1) + spare).tolist()
    return truncated(pairs, dict(zip(claims, used)), encoder.tokenizer, encoder.max_seq_length)

def score_cross(encoder, prompt, args, pairs, pool=None):
    """Logits of a cross-encoder or causal reranker."""
    import torch
    pairs, cut = fitted(encoder, pairs, prompt)
    return encoder.predict(pairs, prompt=prompt, batch_size=args.batch_size, pool=pool,
                           chunk_size=-(-len(pairs) // len(args.device)),
                           activation_fn=torch.nn.Identity()), cut

def score_late(encoder, args, pairs):
    """MaxSim of the token vectors of claim and abstract (late interaction)."""
    sides = []
    for encode, texts in zip((encoder.encode_query, encoder.encode_document), zip(*pairs)):
        known = list(dict.fromkeys(texts))
        vectors = dict(zip(known, encode(known, batch_size=args.batch_size)))
        sides.append([vectors[text] for text in texts])
    return encoder.similarity_pairwise(*sides).float().cpu().numpy(), 0

def score_mono_t5(model, args, pairs):
    """monoT5: logit of true minus logit of false, so that the sigmoid is P(true)."""
    import torch
    tokenizer, scores = model.tokenizer, np.zeros(len(pairs), np.float32)
    used = {claim: len(tokenizer(MONO_T5.format(claim, ""))["input_ids"]) for claim, _ in pairs}
    pairs, cut = truncated(pairs, used, tokenizer, args.max_length)
    [true], [false] = tokenizer(["true", "false"], add_special_tokens=False)["input_ids"]
    order = np.argsort([len(text) for _, text in pairs])
    for rows in np.split(order, range(args.batch_size, len(order), args.batch_size)):
        texts = [MONO_T5.format(*pairs[row]) for row in rows]
        batch = tokenizer(texts, padding=True, return_tensors="pt")
        batch["decoder_input_ids"] = torch.full((len(rows), 1), model.config.decoder_start_token_id)
        with torch.inference_mode():
            logits = model(**batch.to(model.device)).logits[:, 0].float().cpu().numpy()
        scores[rows] = logits[:, true] - logits[:, false]
    return scores, cut

def open_scorer(name, args, bar):
    """Open a model as a function: (claim, abstract) pairs to scores, number of truncated ones."""
    import torch
    model = open_model(load_reranker, name, args, args.dtype)
    if hasattr(model, "encode_document"):
        return functools.partial(score_late, model, args)
    if not hasattr(model, "predict"):
        return functools.partial(score_mono_t5, model, args)
    model.max_seq_length = min(args.max_length, model.max_seq_length or args.max_length)
    prompt_name = args.prompt_name or model.default_prompt_name
    if prompt_name and prompt_name not in model.prompts:
        fail("--prompt-name", f"{name} has the prompts {list(model.prompts)}")
    prompt = model.prompts.get(prompt_name) if args.prompt is None else args.prompt
    if model.dtype != torch.float32:  # half precision gives different abstracts equal scores
        linear = [name for name, part in model.named_modules() if type(part) is torch.nn.Linear]
        model.set_keep_in_fp32_modules(linear[-1:])
    score = functools.partial(score_cross, model, prompt, args)
    if len(args.device) > 1:
        return functools.partial(score, pool=model.start_multi_process_pool(args.device))
    model.register_forward_hook(lambda _, given, out: bar.update(len(out["scores"])) and None)
    return score

# ---------------------------------------------------------------- Scores
def expand(scores, expanded, graph, beam):
    """Return the unscored neighbours of the beam best candidates; expanded grows."""
    best = sorted(scores, key=lambda name: -scores[name])[:beam]
    fresh = [name for name in best if name not in expanded]
    expanded.update(fresh)
    near = dict.fromkeys(other for name in fresh for other in graph[name])
    return [name for name in near if name not in scores]

def score_group(new, claims, texts, score, graph, args):
    """Score {claim_id: [abstract_id]}; with a graph, the neighbours of the best, round by round.

    Returns [(claim_id, abstract_id, score)] and the number of truncated pairs.
    """
    scores, expanded, cut = {claim: {} for claim in new}, {claim: set() for claim in new}, 0
    for _ in range(1 + (args.rounds if graph else 0)):
        pairs = [(claim, name) for claim, names in new.items() for name in names]
        if not pairs:
            break
        found, short = score([(claims[claim], texts[name]) for claim, name in pairs])
        cut += short
        for (claim, name), number in zip(pairs, found.tolist()):
            if not np.isfinite(number):
                fail(f"claim {claim}, abstract {name}", "the score is not a finite number; take "
                     "--dtype fp32, or train the model with a lower --lr")
            scores[claim][name] = number
        if graph:
            new = {claim: expand(scores[claim], expanded[claim], graph, args.beam) for claim in new}
    return [(claim, *pair) for claim in scores for pair in scores[claim].items()], cut

def score_all(name, candidates, claims, texts, graph, args, path):
    """Score {claim_id: [abstract_id]} by one model; path holds finished groups as JSON lines.

    Returns a table of claim_id, abstract_id, score, and the number of truncated pairs.
    """
    import pandas as pd
    from tqdm.auto import tqdm
    rows, cut, score, size = [], 0, None, max(1, GROUP // args.depth)
    for line in path.read_text(encoding="utf-8").split("\n") if path.exists() else []:
        with contextlib.suppress(ValueError):  # a torn line is scored again
            found, short = json.loads(line)
            rows += found
            cut += short
    done = {row[0] for row in rows}
    left = [claim for claim in candidates if claim not in done]
    total = len(rows) + sum(len(candidates[claim]) for claim in left)
    bar = tqdm(total=total, initial=len(rows), desc="rerank", unit=" pairs")
    with bar, open(path, "a", encoding="utf-8") as file:
        for start in range(0, len(left), size):
            group = {claim: candidates[claim] for claim in left[start : start + size]}
            score = score or open_scorer(name, args, bar)
            found, short = score_group(group, claims, texts, score, graph, args)
            file.write("\n" + json.dumps([found, short]))
            file.flush()
            rows += found
            cut += short
            bar.update(len(rows) - bar.n)
    if score and "pool" in score.keywords:
        score.args[0].stop_multi_process_pool(score.keywords["pool"])
    return pd.DataFrame(rows, columns=[*KEY, "score"]), cut

def combined(logits, stance, alpha):
    """ComboScorer (+VeriRel 2025, eq. 5): (1 - alpha) sigmoid(s) + alpha (P(SUP) + P(REF))."""
    from scipy.special import expit
    return (1 - alpha) * expit(logits) + alpha * stance

def z_scores(scores):
    """(score - mean) / standard deviation; 0 where all are equal."""
    spread = np.std(scores.to_numpy())
    return (scores - scores.mean()) / (spread or 1)

def blended(table, weight):
    """(1 - weight) z(score) + weight z(first), claim by claim; what first lacks counts lowest."""
    by = table.groupby("claim_id", sort=False)
    first = table["first"].fillna(by["first"].transform("min")).groupby(table["claim_id"])
    return (1 - weight) * by["score"].transform(z_scores) + weight * first.transform(z_scores)

def rrf(runs):
    """Sum over runs of 1 / (k + rank), a pair at a time (Cormack et al. 2009)."""
    import pandas as pd
    rows = pd.concat(runs)
    rows["score"] = 1 / (RRF_K + rows["rank"])
    return rows.groupby(KEY, sort=False, as_index=False)["score"].sum()

def ranked(table, order, top_k):
    """Return a run, best first; equal scores by order, {abstract_id: place in the corpus}."""
    claim, place = table["claim_id"].factorize()[0], table["abstract_id"].map(order)
    table = table.iloc[np.lexsort((place, -table["score"], claim))]
    table = table.assign(rank=table.groupby("claim_id").cumcount() + 1)[RUN]
    return table[table["rank"] <= top_k] if top_k > 0 else table

def rerank(args):
    """Score the first candidates of each claim."""
    if args.graph and args.verdicts:
        fail("--verdicts", "a graph brings in abstracts without a verdict; leave one of them out")
    extra = [path for path in (args.graph, args.verdicts) if path]
    inputs = sha256_of(args.run, args.claims, args.corpus, *extra, models=args.model)
    numbers = range(1, len(args.model) + 1) if len(args.model) > 1 else []
    outs = [args.out, *(f"{args.out.removesuffix('.tsv')}.{number}.tsv" for number in numbers)]
    if up_to_date(outs, args, inputs):
        return {"made": []}
    claims, texts = read_claims(args.claims), read_texts(args)
    run = read_table(args.run, RUN, claim_id=claims, abstract_id=texts)
    run = run[run["rank"] <= args.depth].rename(columns={"score": "first"})[[*KEY, "first"]]
    run["stance"] = read_stance(args.verdicts, run) if args.verdicts else 0.0
    corpus = inputs[str(Path(args.corpus))]
    graph = read_graph(args.graph, corpus, args.neighbours) if args.graph else None
    candidates = run.groupby("claim_id", sort=False)["abstract_id"].agg(list).to_dict()
    order, runs, facts = {name: place for place, name in enumerate(texts)}, [], []
    parts = parts_of(args, inputs)
    for number, name in enumerate(args.model):
        path = parts / f"{number}.jsonl"
        table, cut = score_all(name, candidates, claims, texts, graph, args, path)
        ties = int(table.duplicated(["claim_id", "score"]).sum())
        facts.append({"model": name, "pairs": len(table), "truncated": cut, "equal_scores": ties})
        print(f"{name}: {len(table)} pairs, {cut} truncated, {ties} equal scores in a claim")
        table = table.merge(run, on=KEY, how="left")
        if args.verdicts:
            table["score"] = combined(table["score"], table["stance"], args.alpha)
        if args.first_stage:
            table["score"] = blended(table, args.first_stage)
        runs.append(ranked(table, order, args.top_k if not numbers else 0))
    if numbers:
        runs.insert(0, ranked(rrf(runs), order, args.top_k))
    for out, table in zip(outs, runs):
        with written(out, args, inputs, rows=len(table), models=facts) as path:
            table.to_csv(path, sep="\t", index=False, float_format="%.9g", lineterminator="\n")
        print(f"{out}: {len(table)} rows, {table['claim_id'].nunique()} claims")
    remove(parts)
    return {"made": outs, "models": facts}

# ---------------------------------------------------------------- Train
def read_examples(path, claims, texts, loss):
    """Return [(claim_id, abstract_ids, target)]; a tuple has its positive first and no target."""
    examples, learnt = [], False
    with open(path, encoding="utf-8-sig", errors="replace") as file:
        for number, line in enumerate(file, 1):
            try:
                example = json.loads(line)
                claim, names = example["claim_id"], [example.get("abstract_id")]
                target = None if "positive" in example else float(example["target"])
                if target is None:
                    names = [example["positive"], *example["negatives"]]
                elif loss in TUPLES:
                    raise ValueError(f"not a tuple, which --loss {loss} needs")
                elif not 0 <= target <= 1:
                    raise ValueError("the target is not between 0 and 1")
                if claim not in claims or not texts.keys() >= set(names):
                    raise ValueError("unknown claim_id or abstract_id")
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
                fail(f"{path}:{number}", f"{error!r}; wanted are pairs or tuples of 02_retrieve.py "
                     "mine, with the claims and corpus that they are of")
            examples.append((claim, names, target))
            learnt = learnt or target != 0
    if not learnt:
        fail(f"{path}:{len(examples)}", "no positive up to this last line: nothing to learn")
    return examples

def pairs_of(examples):
    """Return (claim_id, abstract_id, target), each once; those of a tuple have targets 1 and 0."""
    pairs = []
    for claim, names, target in examples:
        targets = [1.0] + [0.0] * len(names) if target is None else [target]
        pairs += [(claim, name, number) for name, number in zip(names, targets)]
    return list(dict.fromkeys(pairs))

def rows_of(examples, loss, claims, short):
    """Return the table that a loss reads; short: {(claim_id, abstract_id): truncated abstract}."""
    import pandas as pd
    rows, least = [], min(len(names) for _, names, _ in examples)
    if loss in TUPLES:  # margin: a row per negative; mnrl: as many negatives as all tuples have
        for claim, names, _ in examples:
            texts = [short[claim, name] for name in names]
            sides = [texts[:least]] if loss == "mnrl" else [[texts[0], text] for text in texts[1:]]
            rows += [[claims[claim], *side] for side in sides]
        unused = sum(len(names) for _, names, _ in examples) - len(examples) * least
        if loss == "mnrl" and unused:
            print(f"{unused} negatives beyond {least - 1} per tuple are left out, so that all fit")
        table = pd.DataFrame(rows).rename(columns=str)
        return table if loss == "mnrl" else table.assign(label=-1.0)
    for claim, name, target in pairs_of(examples):
        rows.append((claims[claim], short[claim, name], target))
    table = pd.DataFrame(rows, columns=["claim", "abstract", "label"])
    lists = loss in ("lambda", "listnet", "ranknet")
    return table.groupby("claim", sort=False, as_index=False).agg(list) if lists else table

def loss_of(encoder, args):
    """Return the loss on logits that --loss names; mse and l1 compare sigmoids with targets."""
    import torch
    from sentence_transformers.cross_encoder import losses
    loss = getattr(losses, LOSSES[args.loss])(encoder)
    if args.loss == "margin":  # max(0, margin - (s_pos - s_neg)): a hinge whose label is -1
        loss.loss_fct = torch.nn.HingeEmbeddingLoss(margin=args.margin)
    if args.loss in ("mse", "l1"):
        loss.activation_fn = torch.nn.Sigmoid()
    if args.loss == "l1":
        loss.loss_fct = torch.nn.L1Loss()
    return loss

def dev_files(args):
    """Return claims, qrels and run of the dev split, or nothing if one is missing."""
    paths = [Path(args.data) / f"{name}.{args.dev_split}.tsv" for name in ("claims", "qrels")]
    paths.append(Path(args.dev_run))
    return paths if all(map(Path.is_file, paths)) else []

def dev_evaluator(encoder, prompt, texts, args):
    """Return the evaluator of the reranked dev run, or None without a dev split."""
    from sentence_transformers.cross_encoder.evaluation import CrossEncoderRerankingEvaluator
    paths, samples = dev_files(args), []
    if not paths:
        print("no dev split: the last epoch is kept")
        return None
    claims = read_claims(paths[0])
    known = {"claim_id": claims, "abstract_id": texts}
    qrels = read_table(paths[1], [*KEY, "label"], label=LABELS, **known)
    run, qrels = read_table(paths[2], RUN, **known), qrels[qrels["label"] != "NEI"]
    run = run[(run["rank"] <= args.dev_depth) & run["claim_id"].isin(qrels["claim_id"])]
    pairs = [(claims[claim], texts[name]) for claim, name in run[KEY].values]
    run = run.assign(text=[text for _, text in fitted(encoder, pairs, prompt)[0]])
    for claim, rows in run.merge(qrels, on=KEY, how="left").groupby("claim_id", sort=False):
        relevant = list(rows["text"][rows["label"].notna()])
        every = list(rows["text"])
        samples.append({"query": claims[claim], "positive": relevant, "documents": every})
    print(f"dev: {len(samples)} of {qrels['claim_id'].nunique()} claims have candidates")
    return CrossEncoderRerankingEvaluator(
        samples, name="dev", always_rerank_positives=False, write_csv=False)

def check_loss(how, state, control, logs, **_):
    """End the script when the loss is not finite."""
    if not np.isfinite(logs.get("loss", 0)):
        fail("--lr", "the loss is not a finite number; lower it")

def print_epoch(how, state, control, **_):
    """Print one line an epoch."""
    from tqdm.auto import tqdm
    last = {}
    for entry in state.log_history:
        last |= entry
    line = [f"{name} {last[name]:.4f}" for name in ("epoch", "loss", MEASURE) if name in last]
    tqdm.write(", ".join(line), file=sys.stderr)

def one_gpu(args):
    """Hide all GPUs but one: a Trainer multiplies its batches by the GPUs that it sees."""
    kind, _, number = args.device[0].partition(":")
    if kind in ("auto", "cuda"):
        shown = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(64)))).split(",")
        os.environ["CUDA_VISIBLE_DEVICES"], args.device = shown[int(number or 0)], [kind]

def resume(folder, how):
    """Return the newest whole checkpoint, or None; after early stopping, no epoch is begun."""
    for path in sorted(folder.glob("checkpoint-*"), key=lambda path: -int(path.name[11:])):
        with contextlib.suppress(OSError, ValueError):
            state = json.loads((path / "trainer_state.json").read_text(encoding="utf-8"))
            if state["stateful_callbacks"]["TrainerControl"]["args"]["should_training_stop"]:
                how.max_steps = state["global_step"]
            return str(path)
        remove(path)  # torn: its state is written last
    return None

def fit(encoder, table, prompt, evaluator, folder, args):
    """Train on a table; with a dev split, the best epoch is kept. Returns the log."""
    import torch
    from datasets import Dataset
    from sentence_transformers import cross_encoder
    from transformers import EarlyStoppingCallback
    from transformers.trainer_callback import ProgressCallback
    gpu = encoder.device.type == "cuda"
    bf16, bar, watched = gpu and torch.cuda.is_bf16_supported(False), ProgressCallback(), {}
    bar.on_log, bar.on_save = check_loss, print_epoch  # in place of dictionaries
    if evaluator:
        watched = {"eval_strategy": "epoch", "load_best_model_at_end": True,
                   "metric_for_best_model": MEASURE, "greater_is_better": True}
    how = cross_encoder.CrossEncoderTrainingArguments(
        output_dir=str(folder), num_train_epochs=args.epochs, learning_rate=args.lr,
        per_device_train_batch_size=args.batch_size, gradient_accumulation_steps=args.accumulate,
        weight_decay=WEIGHT_DECAY, seed=args.seed, data_seed=args.seed, prompts=prompt,
        lr_scheduler_type="cosine" if args.loss == "l1" else "linear",  # +VeriRel 2025
        batch_sampler="no_duplicates" if args.loss == "mnrl" else "batch_sampler",
        bf16=bf16, fp16=gpu and not bf16, use_cpu=encoder.device.type == "cpu",
        activation_checkpointing=args.gradient_checkpointing, save_strategy="epoch",
        save_total_limit=2, restore_callback_states_from_checkpoint=True, report_to="none",
        logging_strategy="epoch", logging_nan_inf_filter=False, disable_tqdm=False, **watched)
    trainer = cross_encoder.CrossEncoderTrainer(
        encoder, how, Dataset.from_pandas(table), loss=loss_of(encoder, args), evaluator=evaluator)
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(bar)
    if evaluator:
        trainer.add_callback(EarlyStoppingCallback(args.patience))
    trainer.train(resume_from_checkpoint=resume(folder, how))
    return [entry for entry in trainer.state.log_history if MEASURE in entry or "loss" in entry]

def train(args):
    """Fine-tune a cross-encoder, weights in fp32 whatever the checkpoint is stored in."""
    NEUTRAL.discard("batch_size")  # here it changes the weights
    inputs = sha256_of(args.examples, args.claims, args.corpus, *dev_files(args),
                       models=[args.model])
    if up_to_date([args.out], args, inputs):
        return {"made": []}
    claims, texts = read_claims(args.claims), read_texts(args)
    examples = read_examples(args.examples, claims, texts, args.loss)
    if args.loss == "margin" and all(len(names) == 1 for _, names, _ in examples):
        fail(args.examples, "no tuple has a negative; mine with --hard or --easy")
    one_gpu(args)
    import transformers
    transformers.logging.set_verbosity_error()  # a new head is wanted here
    transformers.logging.disable_progress_bar()  # of every checkpoint
    transformers.set_seed(args.seed)
    encoder = open_model(load_reranker, args.model, args, "fp32", train=True)
    encoder.max_seq_length = min(args.max_length, encoder.max_seq_length or args.max_length)
    prompt = encoder.prompts.get(encoder.default_prompt_name)
    pairs = [pair[:2] for pair in pairs_of(examples)]
    short, cut = fitted(encoder, [(claims[claim], texts[name]) for claim, name in pairs], prompt)
    table = rows_of(examples, args.loss, claims, dict(zip(pairs, (text for _, text in short))))
    evaluator = dev_evaluator(encoder, prompt, texts, args)
    if evaluator:
        print(f"before training: {evaluator(encoder)}")
    print(f"{len(examples)} examples, {len(table)} rows, {cut} abstracts truncated")
    log = fit(encoder, table, prompt, evaluator, parts_of(args, inputs), args)
    facts = {"rows": len(table), "truncated": cut, "dev": [e[MEASURE] for e in log if MEASURE in e]}
    with written(args.out, args, inputs, device=str(encoder.device), log=log, **facts) as path:
        encoder.save_pretrained(str(path), create_model_card=False)
    remove(f"{args.out}.parts")
    return {"made": [args.out], **facts}

# ---------------------------------------------------------------- Command line
def main():
    parser, shared, words = command_line("rerank", "train")
    add, data, work, split = parser.add_argument, shared.data, shared.work, shared.split
    add("--claims", default=f"{data}/claims.{split}.tsv", help="the claims")
    add("--corpus", default=f"{data}/corpus.jsonl", help="the abstracts")
    add("--fields", default="title,abstract", help="what is read of an abstract")
    add("--separator", default=" ", help="between fields")
    add("--max-length", type=count, default=512, help="tokens of a pair, at most the "
        "model's own; abstracts are truncated")
    if shared.job == "rerank":
        add("--run", default=f"{work}/{split}/hybrid.tsv", help="the run to rerank")
        add("--model", nargs="+", default=[f"{work}/models/reranker"], help="folders or hub ids: "
            "cross-encoders, causal rerankers, multi-vector models, monoT5")
        add("--out", default=f"{work}/{split}/rerank.tsv", help="the reranked run")
        add("--depth", type=count, default=20, help="candidates per claim")
        add("--top-k", type=int, default=0, help="abstracts kept per claim; 0: all")
        add("--first-stage", type=share, default=0.0, help="weight of --run's scores, as z-scores")
        add("--graph", help="neighbour graph: neighbours of the best are scored, too")
        add("--rounds", type=count, default=ROUNDS, help="graph: at most so many rounds")
        add("--neighbours", type=count, default=NEIGHBOURS, help="graph: per abstract")
        add("--beam", type=count, default=BEAM, help="graph: abstracts whose neighbours join")
        add("--verdicts", help="verdicts of --run: P(SUPPORTS) + P(REFUTES) joins the score")
        add("--alpha", type=share, default=0.5, help="verdicts: their weight")
        add("--prompt", help="instruction in place of the model's own")
        add("--prompt-name", help="which of the model's own prompts")
        add("--batch-size", type=count, default=32, help="pairs per batch")
        add("--dtype", choices=("auto", "fp32", "bf16", "fp16"), default="auto",
            help="auto: half precision on a GPU, last layer in fp32")
    else:
        add("examples", nargs="?", default=f"{work}/{split}/examples.jsonl", help="what to learn")
        add("--model", default="data/models/minilm", help="encoder or reranker to start from")
        add("--out", default=f"{work}/models/reranker", help="folder of the trained model")
        add("--loss", choices=LOSSES, default="bce", help="margin and mnrl read tuples only")
        add("--margin", type=positive, default=0.2, help="margin: lead of a positive")
        add("--epochs", type=positive, default=3, help="passes over the examples, also fractions")
        add("--lr", type=positive, default=2e-5, help="learning rate")
        add("--batch-size", type=count, default=16, help="rows per batch")
        add("--accumulate", type=count, default=1, help="batches per step")
        add("--gradient-checkpointing", action="store_true", help="less memory, more time")
        add("--dev-split", default="dev", help="if there is one, its best epoch is kept")
        add("--dev-run", default=f"{work}/dev/hybrid.tsv", help="the run reranked for that")
        add("--dev-depth", type=count, default=20, help="candidates of it per claim")
        add("--patience", type=count, default=2, help="epochs without a gain on dev")
    finish({"rerank": rerank, "train": train}[shared.job], parser.parse_args(words))

if __name__ == "__main__":
    main()
