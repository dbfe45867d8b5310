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

Reads   work/NAME/SPLIT/hybrid.tsv (02_retrieve.py), data/NAME/claims.SPLIT.tsv, corpus.jsonl
        --graph: index/graph/ (01_index.py graph); --verdicts: verdicts.tsv (05_classify.py)
        train: work/NAME/SPLIT/examples.jsonl (02_retrieve.py mine), and the dev split, if any
Writes  work/NAME/SPLIT/rerank.tsv: claim_id, abstract_id, rank (from 1), score
        Several models: also rerank.1.tsv, rerank.2.tsv, ...; rerank.tsv fuses them by RRF.
        train: work/NAME/models/reranker/
        OUT.parts/ holds finished groups and checkpoints; an interrupted run resumes from them.
Prints  one line of JSON, last on stdout

Examples
    python 02_retrieve.py mine && python 03_rerank.py train
    python 03_rerank.py --depth 50 --first-stage 0.5
    python 03_rerank.py --model BAAI/bge-reranker-large BAAI/bge-reranker-v2-m3 --depth 200
    python 03_rerank.py --model Qwen/Qwen3-Reranker-0.6B --device cuda:0 cuda:1 --max-length 1024
    python 03_rerank.py --depth 30 --graph work/demo/index/graph --top-k 10
    python 03_rerank.py --model castorini/monot5-base-msmarco --verdicts work/demo/test/verdicts.tsv
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

RRF_K = 60                             # Cormack et al. 2009
ROUNDS, NEIGHBOURS, BEAM = 20, 10, 30  # AlexUNLP-FMT 2025
MONO_T5 = "Query: {} Document: {} Relevant:"  # Nogueira et al. 2020; it answers true or false
WEIGHT_DECAY = 0.01                    # Kiepura & Lam 2025, section 4.1
GROUP = 1024                           # pairs, in whole claims, that are scored and stored at once
MANY = 10**9

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
    rows, end = [], 1
    with open(path, encoding="utf-8-sig", errors="replace", newline="") as file:
        reader = csv.reader(file, delimiter="\t")
        header = next(reader, [])
        if not set(columns) <= set(header) or len(set(header)) < len(header):
            fail(f"{path}:1", f"columns {header}, wanted {columns}; see 06_evaluate.py convert")
        for row in reader:
            line, end = end + 1, reader.line_num
            if any(row) and len(row) != len(header):
                fail(f"{path}:{line}", f"{len(row)} fields, not {len(header)}; fix the row")
            if end > line and any("\t" in field and "\n" in field for field in row):
                fail(f"{path}:{line}", "a quotation mark is not closed; see 06_evaluate.py convert")
            if any(row):
                rows.append([line, *row])
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
        made = json.loads(meta.read_bytes()) if meta.is_file() else {"arguments": {}}
        foreign = path.is_dir() and any(path.iterdir()) and made["arguments"]["job"] != args.job
        if foreign or path.resolve() in read:
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
        add_help=False, allow_abbrev=False)
    parser.error = lambda message: fail(Path(sys.argv[0]).name, f"{message}; see --help")
    add = parser.add_argument
    parser.set_defaults(job=job)
    add("--data", default="data/demo", help="folder of corpus, claims and qrels")
    add("--work", default="work/demo", help="folder of everything made from them")
    split = "train" if job in ("train", "mine") else "test"
    add("--split", default=split, help="which claims")
    add("--seed", type=int, default=13, help="of every random choice")
    add("--device", nargs="+", default=["auto"], help="cpu, cuda, mps, or several: cuda:0 cuda:1")
    add("--force", action="store_true", help="make outputs again that are up to date")
    shared, _ = parser.parse_known_args(words)
    add("-h", "--help", action="help", help="show this")
    return parser, shared, words

def finish(job, args):
    """Run the job and print its result as JSON; a fault of the disk is one line, Ctrl-C silence."""
    args.job = f"{Path(sys.argv[0]).name} {args.job}"
    try:
        print(json.dumps(job(args) | spent(), ensure_ascii=False))
    except KeyboardInterrupt:
        sys.exit(130)
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

# ---------------------------------------------------------------- Inputs
def check_numbers(args, **limits):
    """End the script where a flag is outside its limits, given as (lowest, highest)."""
    for name, (lowest, highest) in limits.items():
        if not lowest <= getattr(args, name) <= highest:
            flag = "--" + name.replace("_", "-")
            fail(flag, f"{getattr(args, name)} is not between {lowest} and {highest}")

def read_texts(args):
    """Return {claim_id: claim} and {abstract_id: its fields, joined}."""
    table, corpus = read_table(args.claims, ["claim_id", "claim"]), read_corpus(args.corpus)
    fields, texts = args.fields.split(","), {}
    for field in fields:
        if field != "title" and not any(field in record for record in corpus.values()):
            fail("--fields", f"no abstract in {args.corpus} has the field {field}")
    for name, record in corpus.items():
        parts = [str(record.get(field) or "") for field in fields]
        texts[name] = args.separator.join(part for part in parts if part.strip())
    return dict(zip(table["claim_id"], table["claim"])), texts

def read_graph(folder, corpus, neighbours):
    """Return {abstract_id: [neighbours, nearest first]}; corpus is the sha256 of corpus.jsonl."""
    folder = Path(folder)
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        for name, (size, crc) in meta["files"].items():
            data = (folder / name).read_bytes()
            if [len(data), zlib.crc32(data)] != [size, crc]:
                raise ValueError(f"{name} is damaged")
        ids = json.loads((folder / "abstract_ids.json").read_text(encoding="utf-8"))
        rows = np.load(folder / "neighbours.npy")[:, :neighbours].tolist()
        if meta["corpus"] != corpus:
            raise ValueError("made from another corpus")
        return {name: [ids[place] for place in places] for name, places in zip(ids, rows)}
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        fail(folder, f"no usable neighbour graph ({error}); make it with 01_index.py graph --force")

def read_verdicts(path):
    """Return {(claim_id, abstract_id): P(SUPPORTS) + P(REFUTES)}."""
    columns, found = ["claim_id", "abstract_id", "p_supports", "p_refutes"], {}
    for claim, name, *shares in read_table(path, columns)[columns].values:
        try:
            found[claim, name] = sum(map(float, shares))
        except ValueError:
            found[claim, name] = np.nan
        if not 0 <= found[claim, name] <= 1.001:
            fail(path, f"claim {claim}, abstract {name}: p_supports and p_refutes are no shares")
    return found

def parts_of(args, inputs):
    """Return the folder of unfinished work; what another task left there is removed."""
    folder, task = Path(f"{args.out}.parts"), json.dumps(task_of(args, inputs))
    mark = folder / "task.json"
    if args.force or not mark.is_file() or mark.read_text(encoding="utf-8") != task:
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
    head = (config.architectures or ["no architecture"])[0]
    saved = load_file_path(name, "config_sentence_transformers.json")
    kind = json.loads(Path(saved).read_text(encoding="utf-8")).get("model_type") if saved else ""
    if head.endswith("ForSequenceClassification") and config.num_labels != 1:
        fail(name, f"{config.num_labels} labels, a reranker has one; a stance classifier belongs "
             "to 05_classify.py --model")
    if head.endswith("ForConditionalGeneration") and not train:
        return load_mono_t5(name, **how)
    if kind == "MultiVectorEncoder" and not train:
        return MultiVectorEncoder(name, **how)
    trained = kind == "CrossEncoder" or head.endswith(("ForSequenceClassification", "ForCausalLM"))
    if not trained and not train:
        fail(name, f"{head} has no trained head; train one with 03_rerank.py train --model {name}")
    return CrossEncoder(name, **how)

def load_mono_t5(name, device, trust_remote_code, model_kwargs):
    """Load a sequence-to-sequence model, with its tokenizer as an attribute."""
    from sentence_transformers.util import get_device_name
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
    safe = {"trust_remote_code": trust_remote_code}
    model = AutoModelForSeq2SeqLM.from_pretrained(name, **safe, **model_kwargs)
    model.tokenizer = AutoTokenizer.from_pretrained(name, **safe)
    return model.to(device or get_device_name()).eval()

def limited(model, length):
    """Return length, or the number of positions that the model has learned, if that is less."""
    for name, part in model.named_modules():
        if name.endswith("position_embeddings") and hasattr(part, "num_embeddings"):
            unused = 0 if part.padding_idx is None else part.padding_idx + 1  # as in RoBERTa
            length = min(length, part.num_embeddings - unused)
    return length

def truncated(pairs, used, tokenizer, limit):
    """Truncate abstracts, never claims, so that each pair fits in limit tokens.

    pairs: (claim, abstract); used: {claim: tokens of all but the abstract}. Returns the pairs and
    the number of truncated ones.
    """
    texts = list(dict.fromkeys(text for _, text in pairs))
    coded = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    offsets, short = dict(zip(texts, coded["offset_mapping"])), []
    for claim, text in pairs:
        room = limit - used[claim]
        if room < 1:
            fail("--max-length", f"{limit} tokens leave no room for an abstract beside the claim "
                 f"{claim[:60]!r}; raise it")
        spans = offsets[text]
        short.append((claim, text[: spans[room - 1][1]] if len(spans) > room else text))
    return short, sum(len(new[1]) < len(old[1]) for new, old in zip(short, pairs))

def fitted(encoder, prompt, pairs):
    """Truncate the abstracts to what the cross-encoder reads beside claim and template."""
    claims = list(dict.fromkeys(claim for claim, _ in pairs))
    empty = encoder.preprocess([(claim, "") for claim in claims], prompt=prompt)
    # Inside a chat template, the first and last word may split into more tokens
    slack = 4 if "message" in encoder[0].modality_config else 0
    used = (empty["attention_mask"].sum(dim=1) + slack).tolist()
    return truncated(pairs, dict(zip(claims, used)), encoder.tokenizer, encoder.max_seq_length)

# A scorer takes (claim, abstract) pairs and returns their scores and the number of truncated ones
def score_cross(encoder, args, prompt, pool, bar, pairs):
    """Logits of a cross-encoder."""
    import torch
    pairs, cut = fitted(encoder, prompt, pairs)
    scores = encoder.predict(pairs, prompt=prompt, batch_size=args.batch_size, pool=pool,
                             chunk_size=-(-len(pairs) // len(args.device)),
                             activation_fn=torch.nn.Identity())
    bar.update(len(pairs) if pool else 0)
    return scores, cut

def score_late(encoder, args, bar, pairs):
    """Late interaction: MaxSim of the token vectors of claim and abstract (ColBERT)."""
    sides = []
    for encode, texts in zip((encoder.encode_query, encoder.encode_document), zip(*pairs)):
        known = list(dict.fromkeys(texts))
        vectors = dict(zip(known, encode(known, batch_size=args.batch_size)))
        sides.append([vectors[text] for text in texts])
    bar.update(len(pairs))
    return encoder.similarity_pairwise(*sides).float().cpu().numpy(), 0

def score_mono_t5(model, args, bar, pairs):
    """monoT5: logit of true minus logit of false, so that the sigmoid is P(true)."""
    import torch
    tokenizer, scores = model.tokenizer, np.zeros(len(pairs), np.float32)
    used = {claim: len(tokenizer(MONO_T5.format(claim, ""))["input_ids"]) for claim, _ in pairs}
    pairs, cut = truncated(pairs, used, tokenizer, args.max_length)
    true, false = tokenizer(["true", "false"], add_special_tokens=False)["input_ids"]
    texts = [MONO_T5.format(*pair) for pair in pairs]
    order = sorted(range(len(pairs)), key=lambda place: -len(texts[place]))
    for start in range(0, len(pairs), args.batch_size):
        rows = order[start : start + args.batch_size]
        batch = tokenizer([texts[row] for row in rows], padding=True, return_tensors="pt")
        batch["decoder_input_ids"] = torch.full((len(rows), 1), model.config.decoder_start_token_id)
        with torch.inference_mode():
            logits = model(**batch.to(model.device)).logits[:, 0].float()
        scores[rows] = (logits[:, true[0]] - logits[:, false[0]]).cpu().numpy()
        bar.update(len(rows))
    return scores, cut

def open_scorer(name, args, bar):
    """Open a model and return its scorer: pairs to (scores, number of truncated pairs)."""
    import torch
    from sentence_transformers import CrossEncoder, MultiVectorEncoder
    model = open_model(load_reranker, name, args, args.dtype)
    if isinstance(model, MultiVectorEncoder):
        return functools.partial(score_late, model, args, bar)
    if not isinstance(model, CrossEncoder):
        return functools.partial(score_mono_t5, model, args, bar)
    model.max_seq_length = limited(model, args.max_length)
    prompt_name = args.prompt_name or model.default_prompt_name
    if prompt_name and prompt_name not in model.prompts:
        fail("--prompt-name", f"{prompt_name} is none of {name}'s: {', '.join(model.prompts)}")
    prompt = model.prompts.get(prompt_name) if args.prompt is None else args.prompt
    if model.dtype != torch.float32:  # in half precision, different abstracts get equal scores
        layers = [name for name, part in model.named_modules() if type(part) is torch.nn.Linear]
        model.set_keep_in_fp32_modules(layers[-1:])
    pool = None
    if len(args.device) > 1:
        pool = model.start_multi_process_pool(args.device)
    else:
        model.register_forward_hook(lambda _, given, out: bar.update(len(out["scores"])) and None)
    return functools.partial(score_cross, model, args, prompt, pool, bar)

# ---------------------------------------------------------------- Scores
def expand(scores, expanded, graph, beam):
    """Return the unscored neighbours of the beam best candidates; expanded grows."""
    best = sorted(scores, key=lambda name: -scores[name])[:beam]
    fresh = [name for name in best if name not in expanded]
    expanded.update(fresh)
    near = dict.fromkeys(other for name in fresh for other in graph[name])
    return [name for name in near if name not in scores]

def score_group(candidates, claims, texts, score, graph, args):
    """Score the candidates of some claims; with a graph, the neighbours of the best, too.

    Returns {claim_id: {abstract_id: score}} and the number of truncated pairs.
    """
    scores, expanded = {claim: {} for claim in candidates}, {claim: set() for claim in candidates}
    new, cut = candidates, 0
    for _ in range(1 + (args.rounds if graph else 0)):
        pairs = [(claim, name) for claim, names in new.items() for name in names]
        if not pairs:
            break
        found, shortened = score([(claims[claim], texts[name]) for claim, name in pairs])
        cut += shortened
        for (claim, name), number in zip(pairs, found.tolist()):
            if not np.isfinite(number):
                fail(f"claim {claim}, abstract {name}", "the score is not a finite number; take "
                     "--dtype fp32, or train the model with a lower --lr")
            scores[claim][name] = number
        if graph:
            new = {claim: expand(scores[claim], expanded[claim], graph, args.beam) for claim in new}
    return scores, cut

def groups_of(candidates, size):
    """Yield {claim_id: [abstract_id]} in whole claims, at least size pairs at a time."""
    group, pairs = {}, 0
    for claim, names in candidates.items():
        group[claim] = names
        pairs += len(names)
        if pairs >= size:
            yield group
            group, pairs = {}, 0
    if group:
        yield group

def score_all(name, candidates, claims, texts, graph, args, path):
    """Score all claims by one model, group by group; finished groups are read from path.

    path: JSON lines of score_group's results. Returns as score_group does.
    """
    from tqdm.auto import tqdm
    done, score = {}, None
    for line in path.read_text(encoding="utf-8").split("\n") if path.exists() else []:
        with contextlib.suppress(ValueError):  # a torn line is scored again
            scores, cut = json.loads(line)
            done[tuple(scores)] = scores, cut
    bar = tqdm(total=sum(map(len, candidates.values())), desc="rerank", unit=" pairs")
    with bar, open(path, "a", encoding="utf-8") as file:
        for group in groups_of(candidates, GROUP):
            if tuple(group) in done:
                bar.update(sum(map(len, group.values())))
                continue
            score = score or open_scorer(name, args, bar)
            done[tuple(group)] = score_group(group, claims, texts, score, graph, args)
            file.write("\n" + json.dumps(done[tuple(group)]))
            file.flush()
    scores = {claim: found for part, _ in done.values() for claim, found in part.items()}
    return {claim: scores[claim] for claim in candidates}, sum(cut for _, cut in done.values())

def combined(scores, stance, alpha):
    """ComboScorer (+VeriRel 2025, eq. 5): (1 - alpha) sigmoid(s) + alpha (P(SUP) + P(REF)).

    scores: {claim_id: {abstract_id: logit}}; stance: {(claim_id, abstract_id): probability}.
    """
    from scipy.special import expit
    both = {}
    for claim, found in scores.items():
        for name, logit in found.items():
            if (claim, name) not in stance:
                fail("--verdicts", f"no verdict for claim {claim}, abstract {name}; make them for "
                     "this run with 05_classify.py")
            mixed = (1 - alpha) * float(expit(logit)) + alpha * stance[claim, name]
            both.setdefault(claim, {})[name] = mixed
    return both

def z_scores(scores):
    """(score - mean) / standard deviation; 0 where all are equal."""
    spread = np.std(scores)
    return (scores - np.mean(scores)) / spread if spread else np.zeros(len(scores))

def blended(scores, first, weight):
    """Return {abstract_id: (1 - weight) z(score) + weight z(first-stage score)} of one claim.

    An abstract that the first stage lacks gets its lowest score.
    """
    lowest = min(first.values())
    before = z_scores(np.array([first.get(name, lowest) for name in scores]))
    after = z_scores(np.array(list(scores.values())))
    return dict(zip(scores, ((1 - weight) * after + weight * before).tolist()))

def rrf(runs):
    """Return {claim_id: {abstract_id: sum over runs of 1 / (k + rank)}} (Cormack et al. 2009)."""
    fused = {}
    for run in runs:
        for claim, name, rank in zip(run["claim_id"], run["abstract_id"], run["rank"]):
            found = fused.setdefault(claim, {})
            found[name] = found.get(name, 0.0) + 1 / (RRF_K + rank)
    return fused

def ranked(scores, order, top_k):
    """Return a run, best first; equal scores by order, {abstract_id: place in the corpus}."""
    import pandas as pd
    rows = []
    for claim, found in scores.items():
        names = sorted(found, key=lambda name: (-found[name], order[name]))
        for rank, name in enumerate(names[: top_k or None], 1):
            rows.append((claim, name, rank, found[name]))
    return pd.DataFrame(rows, columns=RUN)

def rerank(args):
    """Score the first candidates of each claim, and write the run or runs."""
    check_numbers(args, depth=(1, MANY), top_k=(0, MANY), first_stage=(0, 1), alpha=(0, 1),
                  rounds=(1, MANY), neighbours=(1, MANY), beam=(1, MANY), max_length=(1, MANY),
                  batch_size=(1, MANY))
    extra = [path for path in (args.graph, args.verdicts) if path]
    inputs = sha256_of(args.run, args.claims, args.corpus, *extra, models=args.model)
    stem = args.out.removesuffix(".tsv")
    outs = [f"{stem}.{number}.tsv" for number in range(1, len(args.model) + 1)]
    outs = [args.out, *outs] if len(outs) > 1 else [args.out]
    if up_to_date(outs, args, inputs):
        return {"made": []}
    claims, texts = read_texts(args)
    run = read_table(args.run, RUN, claim_id=claims, abstract_id=texts)
    run = run[run["rank"] <= args.depth]
    first = {}
    for claim, name, score in zip(run["claim_id"], run["abstract_id"], run["score"]):
        first.setdefault(claim, {})[name] = score
    candidates = {claim: list(found) for claim, found in first.items()}
    corpus = inputs[str(Path(args.corpus))]
    graph = read_graph(args.graph, corpus, args.neighbours) if args.graph else None
    verdicts = read_verdicts(args.verdicts) if args.verdicts else None
    order, runs, facts = {name: place for place, name in enumerate(texts)}, [], []
    parts = parts_of(args, inputs)
    for number, name in enumerate(args.model, 1):
        path = parts / f"{number}.jsonl"
        scores, cut = score_all(name, candidates, claims, texts, graph, args, path)
        pairs = sum(map(len, scores.values()))
        ties = pairs - sum(len(set(found.values())) for found in scores.values())
        print(f"{name}: {pairs} pairs, {cut} abstracts truncated, {ties} equal scores in a claim")
        if verdicts:
            scores = combined(scores, verdicts, args.alpha)
        if args.first_stage:
            for claim, found in scores.items():
                scores[claim] = blended(found, first[claim], args.first_stage)
        runs.append(ranked(scores, order, 0 if len(args.model) > 1 else args.top_k))
        facts.append({"model": name, "pairs": pairs, "truncated": cut, "equal_scores": ties})
    if len(runs) > 1:
        runs = [ranked(rrf(runs), order, args.top_k), *runs]
    for path, table in zip(outs, runs):
        with written(path, args, inputs, rows=len(table), models=facts) as temporary:
            table.to_csv(temporary, sep="\t", index=False, float_format="%.9g", lineterminator="\n")
        print(f"{path}: {len(table)} rows, {table['claim_id'].nunique()} claims")
    remove(parts)
    return {"made": outs, "models": facts}

# ---------------------------------------------------------------- Train
def read_examples(path, claims, texts):
    """Read pairs or tuples (JSON lines of 02_retrieve.py mine), all of one shape."""
    examples, wanted, positive = [], None, False
    with open(path, encoding="utf-8-sig", errors="replace") as file:
        for number, line in enumerate(file, 1):
            try:
                example = json.loads(line)
                names = [example[key] for key in ("positive", "abstract_id") if key in example]
                names += example.get("negatives", [])
                target = 1 if "positive" in example else example["target"]
                wanted = wanted or example.keys()
                known = example["claim_id"] in claims and all(name in texts for name in names)
                if not 0 <= target <= 1 or not names or wanted != example.keys():
                    raise ValueError
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                fail(f"{path}:{number}", "not a pair (claim_id, abstract_id, target between 0 and "
                     "1) or tuple (claim_id, positive, negatives) as in the first line; make it "
                     "with 02_retrieve.py mine --shape pairs or tuples")
            if not known:
                fail(f"{path}:{number}", "unknown claim_id or abstract_id; give the files that go "
                     "together")
            positive = positive or target > 0
            examples.append(example)
    if not positive:
        fail(f"{path}:{len(examples)}", "up to here, the end, no pair has a target above 0")
    return examples

def pairs_of(examples):
    """Return (claim_id, abstract_id, target), each once; those of a tuple have targets 1 and 0."""
    pairs = []
    for example in examples:
        claim = example["claim_id"]
        if "positive" in example:
            pairs.append((claim, example["positive"], 1.0))
            pairs += [(claim, name, 0.0) for name in example["negatives"]]
        else:
            pairs.append((claim, example["abstract_id"], float(example["target"])))
    return list(dict.fromkeys(pairs))

def columns_of(examples, loss, claims, short):
    """Return the columns that a loss reads; short: {(claim_id, abstract_id): truncated text}."""
    if loss == "margin":  # one row a negative
        rows = [(example["claim_id"], example["positive"], name)
                for example in examples for name in example["negatives"]]
    elif loss == "mnrl":  # one row a tuple, as many negatives as all of them have
        least = min(len(example["negatives"]) for example in examples)
        rows = [(example["claim_id"], example["positive"], *example["negatives"][:least])
                for example in examples]
    if loss in ("margin", "mnrl"):
        columns = {"claim": [claims[row[0]] for row in rows]}
        for place in range(1, len(rows[0])):
            columns[f"abstract_{place}"] = [short[row[0], row[place]] for row in rows]
        return columns | ({"label": [-1.0] * len(rows)} if loss == "margin" else {})
    pairs = [(claim, short[claim, name], target) for claim, name, target in pairs_of(examples)]
    lists = {}
    for claim, text, target in pairs:
        found = lists.setdefault(claim, ([], []))
        found[0].append(text)
        found[1].append(target)
    if loss in ("lambda", "listnet", "ranknet"):
        texts, targets = zip(*lists.values())
        return {"claim": [claims[claim] for claim in lists], "abstracts": texts, "label": targets}
    names, texts, targets = zip(*pairs)
    return {"claim": [claims[name] for name in names], "abstract": texts, "label": targets}

def loss_of(encoder, args):
    """Return the loss that --loss names, on logits; mse and l1 on their sigmoids."""
    import torch
    from sentence_transformers.cross_encoder import losses
    if args.loss == "margin":  # max(0, margin - (s_pos - s_neg)) is a hinge with the label -1
        loss = losses.MarginMSELoss(encoder)
        loss.loss_fct = torch.nn.HingeEmbeddingLoss(margin=args.margin)
    elif args.loss in ("mse", "l1"):
        loss = losses.MSELoss(encoder, activation_fn=torch.nn.Sigmoid())
        loss.loss_fct = torch.nn.MSELoss() if args.loss == "mse" else torch.nn.L1Loss()
    else:
        kinds = {"bce": "BinaryCrossEntropy", "lambda": "Lambda", "listnet": "ListNet",
                 "ranknet": "RankNet", "mnrl": "MultipleNegativesRanking"}
        loss = getattr(losses, f"{kinds[args.loss]}Loss")(encoder)
    return loss

def dev_evaluator(encoder, prompt, texts, args):
    """Return the library's evaluator of the reranked --dev-run, or None where there is none."""
    from sentence_transformers.cross_encoder.evaluation import CrossEncoderRerankingEvaluator
    claims, qrels, run = dev_files(args)
    if not run:
        print("no dev split: the model of the last epoch is kept")
        return None
    claims = read_table(claims, ["claim_id", "claim"])
    claims = dict(zip(claims["claim_id"], claims["claim"]))
    qrels = read_table(qrels, ["claim_id", "abstract_id", "label"], claim_id=claims,
                       abstract_id=texts, label=LABELS)
    run = read_table(run, RUN, claim_id=claims, abstract_id=texts)
    run, qrels = run[run["rank"] <= args.dev_depth], qrels[qrels["label"] != "NEI"]
    relevant = set(zip(qrels["claim_id"], qrels["abstract_id"]))
    run = run[run["claim_id"].isin(qrels["claim_id"])]
    pairs = list(zip(run["claim_id"], run["abstract_id"]))
    short, _ = fitted(encoder, prompt, [(claims[claim], texts[name]) for claim, name in pairs])
    samples = {}
    for pair, (claim, text) in zip(pairs, short):
        sample = samples.setdefault(pair[0], {"query": claim, "positive": [], "documents": []})
        sample["documents"].append(text)
        sample["positive"] += [text] if pair in relevant else []
    print(f"dev: {len(samples)} of {qrels['claim_id'].nunique()} claims are in the run")
    return CrossEncoderRerankingEvaluator(
        list(samples.values()), name="dev", always_rerank_positives=False, write_csv=False)

def dev_files(args):
    """Return the paths of claims, qrels and run of the dev split; all None where one is missing."""
    paths = [Path(args.data) / f"{name}.{args.dev_split}.tsv" for name in ("claims", "qrels")]
    paths.append(Path(args.dev_run))
    return paths if all(map(Path.is_file, paths)) else [None] * 3

def curve_of(history):
    """Return [{epoch, loss, map, mrr@10, ndcg@10}] of a trainer's log."""
    epochs = {}
    for entry in history:
        for name, value in entry.items():
            if name in ("epoch", "loss") or name.startswith("eval_dev_"):
                short = name.removeprefix("eval_dev_")
                epochs.setdefault(entry["step"], {})[short] = round(value, 4)
    return [epoch for epoch in epochs.values() if "loss" in epoch]

def print_epoch(how, state, control, **_):
    """Print the last epoch of the curve as one line."""
    line = ", ".join(f"{name} {value}" for name, value in curve_of(state.log_history)[-1].items())
    print(line, file=sys.stderr)

def check_loss(how, state, control, logs, **_):
    """End the script where the loss is not finite."""
    if not np.isfinite(logs.get("loss", 0)):
        fail("--lr", "the loss is not a finite number; lower it")

def one_gpu(args):
    """Hide all GPUs but one: a Trainer uses all that it sees and multiplies its batches."""
    kind, _, number = args.device[0].partition(":")
    if kind in ("auto", "cuda"):
        shown = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(64)))).split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = shown[int(number or 0)]
        args.device = [kind]

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

def fit(encoder, columns, prompt, evaluator, folder, args):
    """Train; the best epoch on dev is kept. Returns the curve."""
    import torch
    from datasets import Dataset
    from sentence_transformers.cross_encoder import (
        CrossEncoderTrainer,
        CrossEncoderTrainingArguments,
    )
    from transformers import EarlyStoppingCallback
    from transformers.trainer_callback import ProgressCallback
    gpu = encoder.device.type == "cuda"
    bf16 = gpu and torch.cuda.is_bf16_supported(False)
    watched = {"eval_strategy": "epoch", "load_best_model_at_end": True,
               "metric_for_best_model": "eval_dev_ndcg@10", "greater_is_better": True}
    how = CrossEncoderTrainingArguments(
        output_dir=str(folder), num_train_epochs=args.epochs, learning_rate=args.lr,
        per_device_train_batch_size=args.batch_size, gradient_accumulation_steps=args.accumulate,
        weight_decay=WEIGHT_DECAY, seed=args.seed, data_seed=args.seed, prompts=prompt,
        lr_scheduler_type="cosine" if args.loss == "l1" else "linear",  # +VeriRel 2025
        batch_sampler="no_duplicates" if args.loss == "mnrl" else "batch_sampler",
        bf16=bf16, fp16=gpu and not bf16, use_cpu=encoder.device.type == "cpu",
        activation_checkpointing=args.gradient_checkpointing, dataloader_pin_memory=gpu,
        save_strategy="epoch", save_total_limit=2, restore_callback_states_from_checkpoint=True,
        logging_strategy="epoch", logging_nan_inf_filter=False, report_to="none",
        **(watched if evaluator else {}))
    bar = ProgressCallback()
    bar.on_log, bar.on_save = check_loss, print_epoch  # a line an epoch instead of dictionaries
    trainer = CrossEncoderTrainer(
        encoder, how, Dataset.from_dict(columns), loss=loss_of(encoder, args), evaluator=evaluator,
        callbacks=[bar, *([EarlyStoppingCallback(args.patience)] if evaluator else [])])
    trainer.remove_callback(ProgressCallback)
    trainer.train(resume_from_checkpoint=resume(folder, how))
    return curve_of(trainer.state.log_history)

def train(args):
    """Fine-tune a cross-encoder on mined examples, in fp32 with autocast on a GPU."""
    check_numbers(args, margin=(0, MANY), epochs=(0.001, MANY), lr=(0, 1), batch_size=(1, MANY),
                  accumulate=(1, MANY), max_length=(1, MANY), dev_depth=(1, MANY),
                  patience=(1, MANY))
    NEUTRAL.discard("batch_size")  # here it changes the weights
    dev = [path for path in dev_files(args) if path]
    inputs = sha256_of(args.examples, args.claims, args.corpus, *dev, models=[args.model])
    if up_to_date([args.out], args, inputs):
        return {"made": []}
    claims, texts = read_texts(args)
    examples = read_examples(args.examples, claims, texts)
    if args.loss in ("margin", "mnrl") and "positive" not in examples[0]:
        fail(args.examples, f"--loss {args.loss} reads tuples; 02_retrieve.py mine --shape tuples")
    if args.loss == "margin" and not any(example["negatives"] for example in examples):
        fail(args.examples, "no tuple has a negative; 02_retrieve.py mine --hard 4")
    one_gpu(args)
    import transformers
    transformers.logging.set_verbosity_error()  # a new head is wanted here
    transformers.set_seed(args.seed)
    encoder = open_model(load_reranker, args.model, args, "fp32", train=True)
    encoder.max_seq_length = limited(encoder, args.max_length)
    prompt = encoder.prompts.get(encoder.default_prompt_name)
    pairs = [pair[:2] for pair in pairs_of(examples)]
    short, cut = fitted(encoder, prompt, [(claims[claim], texts[name]) for claim, name in pairs])
    short = {pair: text for pair, (_, text) in zip(pairs, short)}
    columns = columns_of(examples, args.loss, claims, short)
    evaluator = dev_evaluator(encoder, prompt, texts, args)
    if evaluator:
        print("before training:", evaluator(encoder))
    curve = fit(encoder, columns, prompt, evaluator, parts_of(args, inputs), args)
    kinds = [example.get("kind", "") for example in examples]
    facts = {"examples": {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)},
             "rows": len(columns["claim"]), "truncated": cut, "curve": curve}
    with written(args.out, args, inputs, device=str(encoder.device), **facts) as temporary:
        encoder.save_pretrained(str(temporary), create_model_card=False)
    remove(f"{args.out}.parts")
    return {"made": [args.out], **facts}

# ---------------------------------------------------------------- Command line
def main():
    parser, shared, words = command_line("rerank", "train")
    add, data, work, split = parser.add_argument, shared.data, shared.work, shared.split
    add("--claims", default=f"{data}/claims.{split}.tsv", help="the claims")
    add("--corpus", default=f"{data}/corpus.jsonl", help="the abstracts")
    add("--fields", default="title,abstract", help="what the model reads of an abstract")
    add("--separator", default=" ", help="between fields")
    add("--max-length", type=int, default=512, help="tokens of a pair; abstracts are truncated")
    if shared.job == "rerank":
        add("--run", default=f"{work}/{split}/hybrid.tsv", help="the run to rerank")
        add("--model", nargs="+", default=[f"{work}/models/reranker"],
            help="folders or hub ids of cross-encoders, causal rerankers, multi-vector models, "
            "monoT5; several are fused by RRF")
        add("--out", default=f"{work}/{split}/rerank.tsv", help="the reranked run")
        add("--depth", type=int, default=20, help="candidates scored per claim")
        add("--top-k", type=int, default=0, help="abstracts kept per claim; 0: all")
        add("--first-stage", type=float, default=0.0, help="weight of the given run's scores "
            "beside the model's, as z-scores")
        add("--graph", help="neighbour graph: the neighbours of the best are scored, too")
        add("--rounds", type=int, default=ROUNDS, help="graph: rounds of neighbours")
        add("--neighbours", type=int, default=NEIGHBOURS, help="graph: neighbours per abstract")
        add("--beam", type=int, default=BEAM, help="graph: abstracts whose neighbours join")
        add("--verdicts", help="verdicts of the run: P(SUPPORTS) + P(REFUTES) joins the score")
        add("--alpha", type=float, default=0.5, help="verdicts: their weight")
        add("--prompt", help="instruction for the model, instead of its own")
        add("--prompt-name", help="which of the model's own prompts")
        add("--batch-size", type=int, default=32, help="pairs scored at once")
        add("--dtype", choices=("auto", "fp32", "bf16", "fp16"), default="auto",
            help="auto: bf16 on a GPU (the last layer in fp32), else fp32")
    else:
        add("examples", nargs="?", default=f"{work}/{split}/examples.jsonl",
            help="pairs or tuples of 02_retrieve.py mine")
        add("--model", default="data/models/minilm", help="encoder or reranker to start from")
        add("--out", default=f"{work}/models/reranker", help="folder of the trained model")
        add("--loss", default="bce", help="margin and mnrl read tuples, the others also pairs",
            choices=("bce", "margin", "mse", "l1", "lambda", "listnet", "ranknet", "mnrl"))
        add("--margin", type=float, default=0.2, help="margin: lead of a positive")
        add("--epochs", type=float, default=3, help="passes over the examples, also fractions")
        add("--lr", type=float, default=2e-5, help="learning rate")
        add("--batch-size", type=int, default=16, help="examples per step")
        add("--accumulate", type=int, default=1, help="batches per update")
        add("--gradient-checkpointing", action="store_true", help="less memory, more time")
        add("--dev-split", default="dev", help="where there is one, its best epoch is kept")
        add("--dev-run", default=f"{work}/dev/hybrid.tsv", help="the run reranked for that")
        add("--dev-depth", type=int, default=20, help="candidates of it per claim")
        add("--patience", type=int, default=2, help="epochs without a better dev before the end")
    finish({"rerank": rerank, "train": train}[shared.job], parser.parse_args(words))

if __name__ == "__main__":
    main()
