"""Read the features of a plan's queries: `python -m research.decoders.extract PLAN OUTPUT`.

A run that was ended goes on where it stopped. One thread is used; see OMP_NUM_THREADS.
"""

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import click
import torch
from torch import Tensor, nn

from rsrank_rag.artifact.opening import open_model
from rsrank_rag.backends.torch.backbone import Backbone
from rsrank_rag.backends.torch.fusion import layers_of
from rsrank_rag.cli.arguments import PATH, command
from rsrank_rag.errors import TrainingError
from rsrank_rag.evaluation.datasets import LabelledQuery
from rsrank_rag.method.batches import Row
from rsrank_rag.method.scoring import Consume, ShiftReader
from rsrank_rag.method.template import Template
from rsrank_rag.training.features import FeatureExtractor
from rsrank_rag.training.recipe import FeaturePart
from rsrank_rag.training.store import open_folder

from .instruction import InstructedBackbone
from .plan import Plan, in_order
from .store import Store, parts_of, write_part

DTYPE: Final = "float16"


class SignalReader(ShiftReader):
    """Gives raw value vectors, shifts of keys and of hidden states beside shifts of value vectors.

    Axes: N rows of one query, H KV heads, T scored query tokens, D head dimension, C hidden size.
    """

    backbone: Backbone

    def read(self, rows: Sequence[Row], consume: Consume) -> Tensor:
        """As `ShiftReader.read`, with (N, H, T, 3 D + C / H) for each layer.

        Keys are those before rotation, because rotated keys hold their position.
        """
        seen: dict[str, Tensor] = {}

        def joined(layer: int, shifts: Tensor) -> None:
            count, heads = shifts.shape[:2]
            states = {}
            for name, tensor in seen.items():
                by_head = tensor.float().reshape(*tensor.shape[:2], heads, -1)
                states[name] = by_head.transpose(1, 2)
            parts = [shifts, states["values"][:count]]
            for name in ("keys", "hidden"):
                parts.append(states[name][:count] - states[name][count:])
            consume(layer, torch.cat(parts, -1))

        hooks = []
        for layer in layers_of(self.backbone.model):
            attention: Any = layer.self_attn
            hooks.append(attention.k_proj.register_forward_hook(partial(_keep, seen, "keys")))
            hooks.append(attention.v_proj.register_forward_hook(partial(_keep, seen, "values")))
            hooks.append(layer.register_forward_pre_hook(partial(_keep_input, seen)))
        try:
            similarity: Tensor = super().read(rows, joined)
            return similarity
        finally:
            for hook in hooks:
                hook.remove()


def _keep(
    seen: dict[str, Tensor], name: str, _: nn.Module, inputs: tuple[Tensor, ...], output: Tensor
) -> None:
    seen[name] = output


def _keep_input(seen: dict[str, Tensor], _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    seen["hidden"] = inputs[0]


@command(resumes=True)
@click.argument("plan")
@click.argument("output", type=PATH)
@click.option("--model", help="Folder or Hub id of the language model instead of the plan's.")
def extract(plan: str, output: Path, model: str | None) -> None:
    """Read the features of a plan's queries into OUTPUT, stage by stage."""
    read = Plan.load(plan)
    part = read.model
    template = Template()
    core, prompts = open_model(
        model or part.name,
        part.revision,
        part.load_options(),
        last_layer=None,
        template=template,
        max_lengths=(part.max_length,),
    )
    core = InstructedBackbone.of(core, prompts.instruction)
    layers = range(1, core.num_layers)
    store = Store(output)
    open_folder(
        output,
        {
            "backbone": part.name,
            "bits": core.bits,
            "compute_dtype": str(core.dtype),
            "dtype": DTYPE,
            "head_dim": core.head_dim,
            "max_length": prompts.max_length,
            "template": template.model_dump(),
        },
    )
    options = FeaturePart(dtype=DTYPE)
    extractors = {
        False: FeatureExtractor(ShiftReader(core, prompts, layers), options),
        True: FeatureExtractor(SignalReader(core, prompts, layers), options),
    }
    for number, stage in enumerate(read.stages, start=1):
        planned = list(in_order(stage))
        for done, (part_of_plan, query) in enumerate(planned, start=1):
            started = time.perf_counter(), time.process_time()
            parts = parts_of(query)
            if part_of_plan.first_only:
                parts = {"first": parts["first"]}
            written = 0
            for name, places in parts.items():
                path = store.path(part_of_plan.name, query, name)
                if path.exists():
                    continue
                try:
                    features = extractors[part_of_plan.signals].extract(
                        _with_documents(query, places, oracle=name == "first")
                    )
                except TrainingError as error:
                    click.echo(f"left out: {error}")
                    continue
                write_part(path, features)
                written += len(places)
            if written:
                wall = time.perf_counter() - started[0]
                cpu = time.process_time() - started[1]
                click.echo(
                    f"{time.strftime('%H:%M:%S')} stage {number}, {done} of {len(planned)}: "
                    f"{part_of_plan.name}, {written} documents, {cpu:.1f} s CPU, {wall:.1f} s"
                )


def _with_documents(query: LabelledQuery, places: Sequence[int], *, oracle: bool) -> LabelledQuery:
    """A query with some of its documents; without labels, so that no oracle shift is read."""
    documents = []
    for place in places:
        document = query.documents[place]
        if not oracle:
            document = document.model_copy(update={"relevant": False})
        documents.append(document)
    return query.model_copy(update={"documents": tuple(documents)})


if __name__ == "__main__":
    extract()
