"""The model card of an artifact, made from its config."""

from pathlib import Path

from .config import RSRankConfig

# The part that all model cards share.
USAGE = Path(__file__).with_name("usage.md")

# The placeholder in the card's examples, which `push` replaces by the repository's name.
UNNAMED = "PATH_OR_HUB_ID"


def model_card(config: RSRankConfig) -> str:
    """The README.md of an artifact, made from its config."""
    lines = ["---", "library_name: rsrank-rag", "pipeline_tag: text-ranking"]
    lines.append("tags: [reranker, rag, rsrank]")
    if config.license:
        lines.append(f"license: {config.license}")
    # The Hub refuses a card whose base_model is not a Hub id.
    if is_hub_id(config.backbone.name):
        lines.append(f"base_model: {config.backbone.name}")
    usage = USAGE.read_text(encoding="utf-8")
    lines.append(usage.replace("RULE", str(config.rule)))
    lines += _description(config)
    lines += _metrics_table(config.training.metrics)
    return "\n".join(lines) + "\n"


def _description(config: RSRankConfig) -> list[str]:
    backbone = config.backbone
    training = config.training
    lines = [
        f"- Backbone: `{backbone.name}`, revision `{backbone.revision or 'not pinned'}` "
        f"({backbone.model_type}, {config.depth})",
        f"- B: {size_of_b(config)}",
    ]
    if config.fusion_layer:
        lines.append(
            f"- Fusion: queries see documents from layer {config.fusion_layer} on only. Documents "
            "are run up to that layer, and layers from it on see its input. Cosine and MaxSim "
            "terms of the two may be added to the score. This is not part of the paper's method"
        )
    if config.similarity_window is not None:
        lines.append(
            f"- Similarity windows: {config.similarity_window} positions. The cosine and MaxSim "
            "terms are those of the document's best window, or of the whole document"
        )
    if config.attention_window is not None:
        lines.append(
            f"- Attention window: {config.attention_window} positions. Below the fusion layer, a "
            "document's token attends to the first token and to tokens at most half as far away"
        )
    lines.append(f"- Template: `{config.template.model_dump_json()}`")
    data = ", ".join(training.data) or "not recorded"
    lines.append(f"- Labelled data: {data}; seed {training.seed}")
    if training.settings:
        settings = [f"{name} {value}" for name, value in training.settings.items()]
        lines.append(f"- Settings: {', '.join(settings)}")
    if training.notes:
        lines += ["", training.notes]
    return lines


def size_of_b(config: RSRankConfig) -> str:
    """Layers, heads and dimensions of B in words."""
    layers, heads, rows, dim = config.shape
    ends = str(config.layers[0])
    if layers > 1:
        ends += f"-{config.layers[-1]}"
    return (
        f"layers {ends} ({layers}), {heads} KV heads, P = {rows}, D = {dim}: "
        f"{layers * heads * rows * dim:,} numbers"
    )


def _metrics_table(metrics: dict[str, dict[str, float]]) -> list[str]:
    """A Markdown table with a row a dataset."""
    if not metrics:
        return []
    columns = sorted({name for row in metrics.values() for name in row})
    lines = ["", f"| dataset | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for dataset, row in metrics.items():
        cells = [dataset]
        for name in columns:
            cells.append(f"{round(row[name], 3):g}" if name in row else "")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def is_hub_id(name: str) -> bool:
    """Whether a name can be that of a Hub repository (``owner/name``)."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True
