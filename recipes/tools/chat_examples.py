# /// script
# requires-python = ">=3.11"
# dependencies = ["numpy==2.4.6", "pandas==3.1.1"]
# ///
"""
Turn requests of 05_classify.py llm and gold labels into chats, to fine-tune a language model.

Each chat is a request's messages and the right answer: the label, or {"label": ...} if the request
was made with --structured. This is the format that OpenAI, TRL, LLaMA-Factory, Axolotl and Unsloth
read. Fine-tune elsewhere, serve the model behind an endpoint, and name it in 05_classify.py llm
--base-url --model, with the prompt that made the requests.

A request says which claim and abstract it is about by its text alone, so claims, corpus, --fields
and --max-words have to be those of the call that wrote it. Requests about pairs that nobody has
judged are left out, and so are those whose label the prompt does not name, such as NEI in the
second of two steps. Requests about many pairs at once (--strategy batch) cannot be used.

Reads   requests, written by 05_classify.py llm --backend none; claims, corpus, qrels
Writes  chat.jsonl: {"messages": [...]}, one a line
Prints  the last line is JSON

Example
    python 05_classify.py llm --split train --backend none --model Qwen/Qwen3-8B
    python recipes/tools/chat_examples.py --split train
"""

import json
import re
from collections import Counter

import kit
from kit import CLASSIFY, LABELS, LLM_RERANK


def judged_pairs(args):
    """Return {claim: {abstract: label}} of judged pairs, in the form that prompts show."""
    claims = kit.read_claims(args.claims)
    abstracts = LLM_RERANK.read_abstracts(args.corpus, args.fields)
    qrels = kit.read_qrels(args.qrels, claim_id=claims, abstract_id=abstracts)
    judged = {}
    for claim_id, abstract_id, label in qrels.to_numpy():
        claim, abstract = CLASSIFY.prompt_texts(claims[claim_id], abstracts[abstract_id], args)
        judged.setdefault(claim, {})[abstract] = label
    return judged


def readings_of(prompt, judged):
    """Return (template, label) for each judged pair whose claim and abstract a prompt holds."""
    readings = []
    for claim, labels in judged.items():
        if claim in prompt:
            for abstract, label in labels.items():
                if abstract and abstract in prompt:
                    template = prompt.replace(abstract, "{abstract}").replace(claim, "{claim}")
                    readings.append((template, label))
    return readings


def template_of(all_readings):
    """Return the template of more than half of the prompts; None if no template is so frequent."""
    counts = Counter()
    for readings in all_readings:
        counts.update({template for template, _ in readings})
    prompts = sum(1 for readings in all_readings if readings)
    for template, count in counts.most_common(1):
        if count > prompts / 2 and "<pair 1>" not in template:  # which batches of pairs have
            return template
    return None


def label_of(messages, readings, template):
    """Return the gold label of a request, None if it has none, or one that no message names.

    Another claim can be a part of the claim in the prompt. It leaves another template, so its label
    does not count.
    """
    labels = {label for other, label in readings if other == template}
    if len(labels) != 1:
        return None
    [label] = labels
    text = "\n".join(message["content"] for message in messages)
    return label if re.search(rf"\b{label}\b", text) else None


def chats(args):
    """Write requests with their right answers."""
    task = kit.task_of(args, args.requests, args.claims, args.corpus, args.qrels)
    if kit.up_to_date(args, task, args.out):
        return {"made": []}
    bodies = [request["body"] for request in LLM_RERANK.read_requests(args.requests, "any")]
    judged = judged_pairs(args)
    all_readings = [readings_of(body["messages"][-1]["content"], judged) for body in bodies]
    template = template_of(all_readings)
    counts = dict.fromkeys(LABELS, 0)
    lines = []
    for body, readings in zip(bodies, all_readings):
        label = label_of(body["messages"], readings, template)
        if label:
            counts[label] += 1
            answer = json.dumps({"label": label}) if "response_format" in body else label
            messages = [*body["messages"], {"role": "assistant", "content": answer}]
            lines.append(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")
    if not lines:
        what = "no request is about one judged pair, or none names the labels"
        kit.fail(args.requests, f"{what}; give the --fields and --max-words of 05_classify.py")
    summary = {"chats": len(lines), "left_out": len(bodies) - len(lines), **counts}
    with kit.written(args.out, task, **summary) as new:
        new.write_text("".join(lines), encoding="utf-8")
    return {"made": [args.out], **summary}


# fmt: off
def add_chats(add):
    add("requests", nargs="?", default="{work}/{split}/llm_verdicts.requests.jsonl",
        help="read requests from this file")
    kit.add_claims(add)
    kit.add_corpus(add)
    kit.add_qrels(add)
    add("--fields", default="title,abstract", help="abstracts were made from these fields")
    add("--max-words", type=kit.count_or_0, default=0,
        help="abstracts were cut to this many words; 0: they were not cut")
    add("--out", default="{work}/{split}/chat.jsonl", help="write the chats to this file")
# fmt: on


if __name__ == "__main__":
    kit.run(__doc__, chats, add_chats)
