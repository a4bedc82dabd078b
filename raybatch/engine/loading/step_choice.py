"""Chooses at load how an engine runs its steps, from layers that were measured on this host."""

import logging

from raybatch.config import EngineConfig
from raybatch.engine.loading.loaded_model import LoadedModel, give_back_freed_memory
from raybatch.engine.profile.layer_bench import profile_options
from raybatch.engine.profile.profile_cache import measured_profile
from raybatch.errors import error_text
from raybatch.policy.batches.step_plan import RowShape, plan_steps

_logger = logging.getLogger(__name__)


def planned_attn_batch(model: LoadedModel, config: EngineConfig) -> int | None:
    """Return the tokens that attend at once, None for the plain forward pass.

    What the options say holds. "auto" runs a model without experts plain, as no layer of it gains
    by waiting for more tokens; one with experts by the plan for rows of `RowShape`'s defaults. A
    model that could not be measured runs plain, and a warning says why.
    """
    if config.attn_batch_tokens != "auto":
        return config.attn_batch_tokens
    if config.speculative_tokens or config.cuda_graphs:
        # rows of drafts are part of one forward pass, and a graph is one
        return None
    if model.spec.moe is None or not any(model.spec.moe.is_sparse):
        return None
    try:
        profile, was_read = measured_profile(model.spec, model.weights, profile_options(config))
    except (RuntimeError, MemoryError) as error:
        _logger.warning(
            "%s runs by the plain forward pass, as its layers could not be measured: %s",
            model.name,
            error_text(error),
        )
        return None
    if not was_read:
        give_back_freed_memory(model.device)
    most = min(model.spec.max_model_len, config.max_model_len or model.spec.max_model_len)
    row = RowShape.within(most)
    plan = plan_steps(profile.layers, row)
    how = "by the plain forward pass"
    if plan.attn_batch_tokens is not None:
        how = f"as coroutines that attend over {plan.attn_batch_tokens} tokens at a time"
    _logger.info(
        "%s runs %s, as %s, for %d prompt and %d output tokens (raybatch bench plan tells more)",
        model.name,
        how,
        plan.reason,
        row.prompt_tokens,
        row.output_tokens,
    )
    return plan.attn_batch_tokens
