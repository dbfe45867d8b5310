"""
What the programs in recipes/train/ share: flags, examples, the training loop, saved models.

What a stage does with texts and models, the programs take from its script, so that a model reads
the same in training as later. An interrupted training resumes from its newest checkpoint, and ends
with the same weights as one that was not interrupted.
"""

import contextlib
import json
import os
import sys
from importlib import import_module
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).parents[1]))
kit = import_module("tools.kit")
SCRIPTS = ("01_index", "02_retrieve", "03_rerank", "05_classify")
INDEX, RETRIEVE, RERANK, CLASSIFY = map(import_module, SCRIPTS)
STOPPED = '"should_training_stop": true'  # in trainer_state.json: no step is left
INPUTS = ("examples", "claims", "qrels", "corpus", "dev_run")  # flags that name files


# ---------- Inputs
def read_examples(path, rows_of, *others):
    """Return the rows that rows_of(example, *others) makes of each example in a file of mine.py."""
    rows = []
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                rows += rows_of(json.loads(line), *others)
            except (LookupError, ValueError, TypeError) as error:
                kit.fail(
                    f"{path}:{number}",
                    f"no JSON, or an unknown field, label, claim or abstract: {error}; "
                    "see recipes/train/mine.py --help",
                )
    if not rows:
        kit.fail(path, "no example for this loss; see recipes/train/mine.py --help")
    return rows


def tuple_of(example, claims, abstracts):
    """Return the texts of an example of --shape tuples: (claim, positive, negative, ...)."""
    abstract_ids = [example["positive"], *example["negatives"]]
    texts = [abstracts[str(abstract_id)] for abstract_id in abstract_ids]
    return (claims[str(example["claim_id"])], *texts)


def dev_files(args, *others):
    """Return the claims and qrels of --dev-split, and others, if all are there, else []."""
    if not args.dev_split:
        return []
    paths = [f"{args.data}/{kind}.{args.dev_split}.tsv" for kind in ("claims", "qrels")]
    paths += others
    # classifier.py: a split that is named has to be there
    if "held_out" in args or all(map(os.path.exists, paths)):
        return paths
    print(f"no dev evaluation without {' and '.join(paths)}: the last epoch is kept")
    return []


# ---------- Checkpoints
def newest_checkpoint(folder):
    """Return the newest checkpoint that is whole, or None.

    trainer_state.json is written last, and ends with a line break.
    """
    newest = None
    for state in sorted(folder.glob("checkpoint-*/trainer_state.json"), key=os.path.getmtime):
        if state.read_text().endswith("}\n"):
            newest = str(state.parent)
    return newest


def resumable(trainer_class):
    """Return a class of trainers whose checkpoints hold only the weights that are trained.

    The library has no setting for it, so the methods that save and load are replaced.
    """
    from safetensors.torch import load_file, save_file

    class Resumable(trainer_class):
        def add_model_card_callback(self, *_):
            """Collect nothing for a model card."""

        def _save(self, folder, **_):
            os.makedirs(folder, exist_ok=True)
            weights = self.model.named_parameters()
            trained = {name: weight for name, weight in weights if weight.requires_grad}
            save_file(trained, f"{folder}/trained.safetensors")

        def _load_from_checkpoint(self, folder):
            self.model.load_state_dict(load_file(f"{folder}/trained.safetensors"), strict=False)

    return Resumable


def saves_within_epochs():
    """Return a callback of the trainer that saves every save_steps, too, not only after an epoch.

    The last step of an epoch is left to the trainer, which saves it once dev has been scored.
    """
    from transformers import TrainerCallback

    class SaveWithinEpochs(TrainerCallback):
        def on_step_end(self, _, state, control, **__):
            is_last = state.epoch % 1 == 0 or control.should_training_stop
            if state.global_step % state.save_steps == 0 and not is_last:
                # Logged, too: a resumed training logs the mean loss of the steps from here on.
                control.should_log = control.should_save = True

    return SaveWithinEpochs()


# ---------- Training
def begin(args, *others):
    """Return the task of a training, and set what training needs; end if its output is up to date.

    others: paths of inputs beside those that flags name.
    """
    named = filter(None, map(vars(args).get, INPUTS))
    task = kit.LLM_RERANK.task_of(args, *others, *named, models=[args.model])
    if kit.up_to_date(args, task, args.out, is_folder=True):
        print('{"made": []}')
        sys.exit()
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")  # a Trainer multiplies its batch by GPUs
    args.device = None  # this GPU, if there is one
    args.dtype = "fp32"
    from transformers import logging, set_seed

    set_seed(args.seed)  # a new head and adapters begin at random
    # It reports the weights of a new head as missing, and settings of a resumed training as equal.
    logging.set_verbosity_error()
    return task


def add_adapter(network, args):
    """Add low-rank adapters to a network, and freeze all but them and its head (Hu et al. 2021)."""
    from peft import LoraConfig, LoraModel

    # First all weights are made trainable (a classifier) or frozen (any other network). LoraModel
    # then freezes the base, so of the rest only a classifier's head is trained.
    network.requires_grad_("Classification" in type(network).__name__)
    config = LoraConfig(
        r=args.lora,
        lora_alpha=args.lora_alpha or 2 * args.lora,
        lora_dropout=args.lora_dropout,
        target_modules="all-linear",
    )
    return LoraModel(network.base_model, config, "default")


def fine_tune(folder, args, model, data, loss, evaluator, measure, **settings):
    """Train a model; return {"rows": how many, "loss": [...], measure: [...]}.

    Each loss is the mean over the steps since the one before it. The values of the measure are that
    of the model before training, then one for each epoch. With an evaluator, the epoch with the
    best measure is kept, else the last one. folder: keeps checkpoints; training goes on from the
    newest one. data: {column: values}. settings: further arguments of training.
    """
    import sentence_transformers
    import torch
    from datasets import Dataset
    from transformers import EarlyStoppingCallback

    is_gpu = model.device.type == "cuda"
    has_bf16 = is_gpu and torch.cuda.is_bf16_supported(including_emulation=False)
    settings |= {
        "num_train_epochs": args.epochs,
        "per_device_train_batch_size": args.batch_size,
        "gradient_accumulation_steps": args.accumulate,
        "gradient_checkpointing": args.checkpointing or None,  # the library warns of False
        "learning_rate": args.lr,
        "lr_scheduler_type": args.schedule.replace("constant", "constant_with_warmup"),
        "warmup_steps": args.warmup,
        "weight_decay": args.weight_decay,
        "seed": args.seed,
        "bf16": has_bf16,
        "fp16": is_gpu and not has_bf16,
        "save_strategy": "epoch",
        "save_steps": 0.1,  # share of all steps; see saves_within_epochs()
        "save_total_limit": 2,
        "restore_callback_states_from_checkpoint": True,
        "logging_strategy": "epoch",
        "logging_nan_inf_filter": False,
        "metric_for_best_model": measure,
    }
    checkpoint = newest_checkpoint(folder)
    if checkpoint and STOPPED in Path(checkpoint, "trainer_state.json").read_text():
        settings["num_train_epochs"] = 0  # early stopping has ended the training
    callbacks = [saves_within_epochs()]
    values = []
    if evaluator:
        settings |= {"eval_strategy": "epoch", "load_best_model_at_end": True}
        callbacks.append(EarlyStoppingCallback(args.patience))
        values.append(evaluator(model)[measure])
    if args.lora:
        adapter = add_adapter(model.transformers_model, args)
    data = Dataset.from_dict(data)
    trainer_class = getattr(sentence_transformers, f"{type(model).__name__}Trainer")
    with contextlib.redirect_stdout(sys.stderr):  # the library prints logs of training
        trainer = resumable(trainer_class)(
            model,
            trainer_class.training_args_class(str(folder), **settings),
            data,
            loss=loss,
            evaluator=evaluator,
            callbacks=callbacks,
        )
        trainer.train(checkpoint)
    if args.lora:
        adapter.merge_and_unload()  # into fp32 weights: in bf16, scores would move by 0.01
    log = trainer.state.log_history
    losses = [line["loss"] for line in log if "loss" in line]
    if not np.isfinite(losses).all():
        kit.fail("--lr", "the loss is not a finite number; lower it")
    values += [line[f"eval_{measure}"] for line in log if f"eval_{measure}" in line]
    return {"rows": len(data), "loss": losses, measure: values}


def save_model(model, task, summary, args):
    """Save a model, with its tokenizer as it was before training; return the result of the job."""
    if model.transformers_model:  # static embeddings have none, and read whole texts
        # The tokenizer would keep the truncation of training.
        model.tokenizer.backend_tokenizer.no_truncation()
        model.tokenizer.backend_tokenizer.no_padding()
        model.max_seq_length = model.tokenizer.init_kwargs.get("model_max_length")
    with kit.written(args.out, task, **summary) as folder:
        model.save_pretrained(folder, create_model_card=False)
    return {"made": [args.out], **summary}


# ---------- Flags
# fmt: off
def add_training(
    add, out, epochs, lr, batch_size, schedule="linear", warmup=0.0, weight_decay=0.0
):
    add("--out", default=f"{{work}}/models/{out}", help="write the trained model to this folder")
    add("--model", default="data/models/minilm", help="""start from this model, a folder or a name
        on the hub; a reranker or classifier without a fitting head gets a new one""")
    add("--epochs", type=kit.positive, default=epochs,
        help="maximum number of epochs")
    add("--lr", type=kit.amount, default=lr, help="peak learning rate; see --schedule")
    add("--schedule", choices=("constant", "linear", "cosine"), default=schedule,
        help="keep the learning rate, or let it fall to 0 linearly or by a cosine")
    add("--warmup", type=kit.share, default=warmup,
        help="raise the learning rate from 0 over this share of the steps, below 1")
    add("--weight-decay", type=kit.amount, default=weight_decay,
        help="weight decay of AdamW")
    add("--batch-size", type=kit.count, default=batch_size,
        help="train on this many rows per batch")
    add("--accumulate", type=kit.count, default=1,
        help="accumulate gradients over this many batches")
    add("--lora", type=kit.count_or_0, default=0, help="""train the head and
        LoRA adapters of this rank, and merge them into the weights at the end; 0 trains all
        weights; needs the package peft""")
    add("--lora-alpha", type=kit.positive, help="""weigh the adapters by this number over the rank
        (default: twice the rank)""")
    add("--lora-dropout", type=kit.share, default=0.0,
        help="leave out this share of an adapter's inputs in training")
    add("--checkpointing", action="store_true",
        help="use gradient checkpointing: slower, less memory")
    add("--seed", type=kit.count_or_0, default=13,
        help="seed of the order of examples, of a new head and of dropout")


def add_dev(add, split="dev", patience=2):
    add("--dev-split", default=split,
        help="""keep the epoch with the best score on this split; without its files, or with none,
        the last epoch is kept (classifier.py: the split takes the place of --held-out)""")
    add("--patience", type=kit.count, default=patience,
        help="stop after this many epochs without a better score on dev or held-out data")
# fmt: on
