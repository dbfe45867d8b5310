# /// script
# requires-python = ">=3.11"
# dependencies = ["numpy==2.4.6", "pandas==3.1.1", "torch==2.13.0", "transformers==5.23.0"]
# ///
"""
Average the weights of models that were fine-tuned from one base: a model soup.

The averaged model takes as long as one model, while a fusion of their runs takes as long as all of
them (Wortsman et al. 2022, uniform soup). The models may differ in seed, batch size, learning rate
and training examples, but not in their base and head.

Reads   folders of models, as recipes/train/encoder.py, reranker.py and classifier.py write them
Writes  OUT: the mean of their weights, in fp32; all other files are copied from the first model
Prints  the last line is JSON

Example
    python recipes/tools/average.py work/mine/models/mean work/mine/models/reranker-{1,2,3}
    python 03_rerank.py --data data/mine --model work/mine/models/mean
"""

import shutil
from pathlib import Path

import kit


def weights_of(folder):
    """Return the weights of a model: {name of a file: {name of a parameter: tensor}}."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    weights = {}
    for path in sorted(Path(folder).glob("**/*.safetensors")):
        try:
            weights[str(path.relative_to(folder))] = load_file(path)
        except SafetensorError as error:
            kit.fail(path, f"{error}; download or train this model again")
    return weights


def shapes_of(weights):
    """Return the shape of every parameter."""
    shapes = {}
    for file, parameters in weights.items():
        for name, tensor in parameters.items():
            shapes[file, name] = tensor.shape
    return shapes


def average(args):
    """Write the mean of the weights of several models."""
    from safetensors.torch import save_file

    task = kit.task_of(args, *args.models)
    made = kit.sidecar_of(args.out)
    if made and made.get("arguments", {}).get("job") != "average":
        kit.fail(args.out, "a model that this script has not made; name OUT before the models")
    if kit.up_to_date(args, task, args.out, is_folder=True):
        return {"made": []}
    first, *others = args.models
    total = weights_of(first)
    if not total:
        kit.fail(first, "no *.safetensors in it; name the folder of a model")
    shapes = shapes_of(total)
    for folder in others:
        weights = weights_of(folder)
        if shapes_of(weights) != shapes:
            kit.fail(folder, f"other parameters than {first} has; name models of one base")
        for file, parameters in weights.items():
            for name, tensor in parameters.items():
                total[file][name] = total[file][name].double() + tensor
    with kit.written(args.out, task) as new:
        shutil.copytree(first, new, ignore=shutil.ignore_patterns("*.safetensors"))
        for file, parameters in total.items():
            means = {
                name: (tensor / len(args.models)).float() for name, tensor in parameters.items()
            }
            save_file(means, new / file, metadata={"format": "pt"})
    return {"made": [args.out], "models": len(args.models)}


def add_average(add):
    # fmt: off
    add("out", help="write the averaged model to this folder")
    add("models", nargs="+", help="average these folders of models, all fine-tuned from one base")
    # fmt: on


if __name__ == "__main__":
    kit.run(__doc__, average, add_average)
