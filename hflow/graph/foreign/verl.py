"""The names of verl's ``ppo_trainer.yaml`` and ``sft_trainer_engine.yaml``, by section (verl of August 2026).

`docs/from-verl.md` has the same lines, with more to say.
"""

from __future__ import annotations

from collections.abc import Mapping

from hflow.graph.foreign.foreign_name import ForeignName, said, unsaid

_CLIP = "hflow.ops.losses.ppo_clip"
_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def _each(prefix: str, names: str) -> str:
    """The names with what stands before them."""
    return ", ".join(f"{prefix}.{name}" for name in names.split(", "))


_DATA = (
    said("data.train_files", "dataset of data"),
    said("data.val_files", "evaluations.NAME.data"),
    said("data.train_max_samples", "split of data", "of a dataset on the hub; else a shorter file"),
    said("data.val_max_samples", "evaluations.NAME.rows"),
    said("data.train_batch_size, data.gen_batch_size", "batch of data", "prompts of a step"),
    unsaid("data.val_batch_size", "an evaluation's rows run at once, as the plan divides them"),
    said(
        "data.prompt_key, data.messages_key",
        "messages of data",
        "of conversations; else a template, `prompt`",
    ),
    said("data.response_key", "response of data", "a template, `{{ answer }}`"),
    said("data.reward_fn_key", "out of data", "a column `str[batch]` that your reward reads"),
    said("data.max_prompt_length", "max_prompt_tokens of data"),
    said("data.max_response_length", "max_new_tokens of generate"),
    said(
        "data.filter_overlong_prompts, data.truncation",
        "max_prompt_tokens of data",
        "longer rows are dropped",
    ),
    said("data.shuffle", "shuffle of data"),
    said("data.seed", "seed", "of the file; one for data order and sampling"),
    said("data.tool_config_path", "tools of data"),
    said("data.apply_chat_template_kwargs", "template_args of data"),
    said("data.tokenizer", "tokenizer of data", "the name of a model"),
    said("data.sampler.class_path", "curriculum of data"),
    unsaid("data.custom_cls.path, data.datagen.path", "sources, templates and filters say what rows are"),
    unsaid("data.image_key, data.video_key, data.audio_key", "texts only"),
    unsaid("data.dataloader_num_workers", "rows are drawn by the workers themselves"),
    unsaid("data.trust_remote_code", "no code of a model or a dataset is run"),
)
_MODEL = (
    said("actor_rollout_ref.model.path", "models.NAME.path", "a folder on this machine"),
    said("actor_rollout_ref.model.custom_chat_template", "chat_template of data", "a `FILE.jinja`"),
    said("actor_rollout_ref.model.enable_gradient_checkpointing", "--pin", "`--pin actor_train=recompute`"),
    said(_each("actor_rollout_ref.model", "lora_rank, lora.rank"), "models.NAME.adapter.rank"),
    said("actor_rollout_ref.model.lora_alpha", "models.NAME.adapter.alpha"),
    said("actor_rollout_ref.model.target_modules", "models.NAME.adapter.targets"),
    said("actor_rollout_ref.model.lora_adapter_path", "models.NAME.adapter.path"),
    unsaid("actor_rollout_ref.model.override_config", "the model is what its folder says"),
    unsaid(
        _each("actor_rollout_ref.model", "use_remove_padding, use_liger, use_fused_kernels"),
        "the engine's business",
    ),
    unsaid(
        "actor_rollout_ref.model.enable_activation_offload", "`--pin actor_train=recompute` saves activations"
    ),
)
_TRAINING = (
    said(f"{_ACTOR}.optim.lr", "lr of train"),
    said(_each(f"{_ACTOR}.optim", "lr_scheduler_type, lr_scheduler, warmup_style"), "schedule of train"),
    said(
        _each(f"{_ACTOR}.optim", "lr_warmup_steps, lr_warmup_steps_ratio"),
        "warmup_steps of train",
        "optimizer steps, a whole number",
    ),
    said(f"{_ACTOR}.optim.min_lr_ratio", "min_lr of train", "the rate itself, not its share of `lr`"),
    unsaid(f"{_ACTOR}.optim.num_cycles", "`cosine` falls once"),
    unsaid(f"{_ACTOR}.optim.total_training_steps", "the compiler counts the optimizer steps of a run"),
    said(f"{_ACTOR}.optim.weight_decay", "weight_decay of train", "verl's default is 0.01, here it is 0"),
    said(f"{_ACTOR}.optim.betas", "betas of train"),
    said(f"{_ACTOR}.grad_clip, {_ACTOR}.optim.clip_grad", "clip_grad of train"),
    unsaid(f"{_ACTOR}.optim.optimizer", "every train node is AdamW"),
    said(
        f"{_ACTOR}.ppo_mini_batch_size",
        "repeat.minibatch of train",
        "rows, not prompts: multiply by `n` of the rollout",
    ),
    said(
        _each(_ACTOR, "ppo_micro_batch_size_per_gpu, ppo_micro_batch_size"),
        "--pin",
        "the compiler decides; `--pin actor_train=micro4` insists",
    ),
    said(
        _each(_ACTOR, "use_dynamic_bsz, ppo_max_token_len_per_gpu"),
        "--pin",
        "micro-batches always fill by tokens, with `--pin actor_train=micro4` as many as four rows of the "
        "greatest length have",
    ),
    said(f"{_ACTOR}.ppo_epochs", "repeat.epochs of train"),
    unsaid(f"{_ACTOR}.shuffle", "minibatch k holds every K-th row, in every pass"),
    said(f"{_ACTOR}.clip_ratio, {_ACTOR}.clip_ratio_low", f"clip of {_CLIP}"),
    said(f"{_ACTOR}.clip_ratio_high", f"clip_high of {_CLIP}"),
    said(f"{_ACTOR}.clip_ratio_c", f"dual_clip of {_CLIP}", "verl's default is 3.0, here there is none"),
    said(f"{_ACTOR}.policy_loss.loss_mode", "loss of train"),
    said(f"{_ACTOR}.loss_agg_mode", "aggregate of train"),
    unsaid(f"{_ACTOR}.loss_scale_factor", "scales the gradient: `clip_grad` sees it, AdamW does not"),
    said(f"{_ACTOR}.entropy_coeff", f"entropy_coef of {_CLIP}"),
    said(f"{_ACTOR}.use_kl_loss", "in of train", "`ref_logprobs` of a `score` node"),
    said(f"{_ACTOR}.kl_loss_coef", f"kl_coef of {_CLIP}"),
    said(f"{_ACTOR}.kl_loss_type", f"kl of {_CLIP}", "`k1`, `k2` or `k3`"),
    said(
        _each(_ACTOR, "fsdp_config.param_offload, fsdp_config.optimizer_offload"),
        "--pin",
        "the compiler decides; `--pin ref_logprobs=offload` insists",
    ),
    said(
        _each(f"{_ACTOR}.megatron", "tensor_model_parallel_size, pipeline_model_parallel_size")
        + f", {_ACTOR}.fsdp_config.fsdp_size",
        "--pin",
        "the compiler decides; `--pin actor_train=tp2,pp2` insists",
    ),
    said(
        f"{_ACTOR}.ulysses_sequence_parallel_size, {_ACTOR}.megatron.context_parallel_size",
        "--pin",
        "the compiler decides where rows are long; `--pin actor_train=cp2` insists",
    ),
    unsaid(f"{_ACTOR}.strategy, {_ACTOR}.use_torch_compile", "models train on Megatron-core"),
    unsaid(f"{_ACTOR}.checkpoint.save_contents", "a checkpoint holds all that a run needs to go on"),
    said("actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu", "--pin", "`--pin ref_logprobs=micro4`"),
)
_SAMPLING = (
    said(f"{_ROLLOUT}.name", "--engine", "`--engine rollout=sglang`"),
    said(f"{_ROLLOUT}.n", "n of generate"),
    said(f"{_ROLLOUT}.temperature", "temperature of generate"),
    said(f"{_ROLLOUT}.top_p", "top_p of generate", "with `max_kept`, where log-probs are compared"),
    said(f"{_ROLLOUT}.top_k", "top_k of generate", "leave it out for -1"),
    said(f"{_ROLLOUT}.do_sample", "temperature of generate", "0 is greedy"),
    said(f"{_ROLLOUT}.response_length", "max_new_tokens of generate"),
    said(f"{_ROLLOUT}.prompt_length", "max_prompt_tokens of data"),
    said(f"{_ROLLOUT}.val_kwargs", "evaluations.NAME.sampling"),
    said(
        f"{_ROLLOUT}.tensor_model_parallel_size", "--pin", "the compiler decides; `--pin rollout=tp2` insists"
    ),
    unsaid(f"{_ROLLOUT}.free_cache_engine", "the compiler decides what waits in the host's memory"),
    said(f"{_ROLLOUT}.dtype", "models.NAME.dtype"),
    unsaid(
        _each(_ROLLOUT, "gpu_memory_utilization, max_num_batched_tokens, max_num_seqs, max_model_len"),
        "the plan counts what a rollout needs",
    ),
    unsaid(
        _each(
            _ROLLOUT,
            "mode, load_format, enforce_eager, enable_chunked_prefill, enable_prefix_caching, engine_kwargs",
        ),
        "the engine's business",
    ),
    unsaid(f"{_ROLLOUT}.ignore_eos", "the end token ends a response"),
    unsaid(f"{_ROLLOUT}.calculate_log_probs", "always: `logprobs` of the rollout"),
    said(f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu", "--pin", "`--pin actor_logprobs=micro4`"),
    said(f"{_ROLLOUT}.multi_turn.enable", "nodes", "turns are nodes: `generate`, `call`, `generate`"),
    said(f"{_ROLLOUT}.multi_turn.max_tool_response_length", "max_observation_tokens of generate"),
    said(f"{_ROLLOUT}.multi_turn.tool_config_path", "tools of data, fn of call"),
    unsaid(
        _each(f"{_ROLLOUT}.multi_turn", "max_assistant_turns, max_user_turns"),
        "each turn is a `generate` node",
    ),
    unsaid(f"{_ROLLOUT}.agent.default_agent_loop", "turns are nodes of the graph"),
)
_ALGORITHM = (
    said("algorithm.adv_estimator", "fn of call", "`extends: grpo`, `rloo`, `ppo` and others have the nodes"),
    said("algorithm.gamma", "gamma of hflow.ops.gae.gae"),
    said("algorithm.lam", "lam of hflow.ops.gae.gae"),
    said(
        "algorithm.norm_adv_by_std_in_grpo",
        "std of hflow.ops.advantages.group_normalise",
        "`sample` or `none`",
    ),
    said("algorithm.use_kl_in_reward", "hflow.ops.shaping.token_rewards", "or `sequence_rewards` there"),
    unsaid("algorithm.kl_penalty", "rewards take k1; a loss takes what its option `kl` says"),
    said("algorithm.kl_ctrl.kl_coef", "kl_coef of hflow.ops.shaping.token_rewards"),
    unsaid(
        "algorithm.kl_ctrl.type, algorithm.kl_ctrl.target_kl, algorithm.kl_ctrl.horizon",
        "`kl_coef` is fixed",
    ),
    said(
        "algorithm.filter_groups.enable", "hflow.ops.filters.mixed_groups", "as `keep` of a `repeat` region"
    ),
    said("algorithm.filter_groups.max_num_gen_batches", "times of repeat"),
    said(
        "algorithm.rollout_correction.rollout_is, algorithm.rollout_correction.rollout_is_threshold",
        f"importance_cap of {_CLIP}",
        "with inputs `old_logprobs` of a `score` node and `rollout_logprobs` of the rollout",
    ),
    said("algorithm.rollout_correction.bypass_mode", "in of train", "`old_logprobs: rollout.logprobs`"),
    unsaid("algorithm.rollout_correction.rollout_rs", "rows are weighted, not rejected"),
    unsaid("algorithm.use_pf_ppo", "rows are learned as often as `epochs` says"),
    said("critic.model.path", "models.NAME.path", "with `head: scalar`"),
    said("critic.optim.lr", "lr of train", "of the critic's own train node"),
    said("critic.cliprange_value", "clip of hflow.ops.values.value_clip", "verl's default is 0.5, here 0.2"),
    said("reward.custom_reward_function.path, reward.custom_reward_function.name", "fn of call"),
    said("reward.reward_manager.name", "fn of call", "`timeout_s` of `call` limits its time"),
    said("reward.reward_model.enable", "models.NAME.head", "`scalar`, read by a `score` node"),
    said("reward.reward_model.model_path", "models.NAME.path", "with `head: scalar`, `frozen: true`"),
    unsaid("reward.sandbox_fusion.url", "a reward function can call a service"),
)
_TRAINER = (
    said("trainer.total_training_steps", "loop.times"),
    said(
        "trainer.total_epochs", "loop.times", "steps, not passes: rows of the data / `batch`, for each pass"
    ),
    said("trainer.project_name, trainer.experiment_name", "name", "of the file"),
    said("trainer.logger", "run.trackers", "`tensorboard`, `wandb`, `mlflow`; the console always"),
    said("trainer.rollout_data_dir", "run.samples"),
    unsaid(
        "trainer.log_val_generations, trainer.validation_data_dir",
        "samples are of the steps, not of evaluations",
    ),
    said("trainer.nnodes, trainer.n_gpus_per_node, trainer.device", "--cluster"),
    said("trainer.save_freq", "run.checkpoint.every"),
    said("trainer.max_actor_ckpt_to_keep, trainer.max_critic_ckpt_to_keep", "run.checkpoint.keep"),
    said("trainer.default_local_dir", "--run-dir"),
    unsaid("trainer.default_hdfs_dir", "the run folder lies in a file system that all hosts see"),
    said("trainer.resume_mode, trainer.resume_from_path", "--resume"),
    said("trainer.test_freq", "evaluations.NAME.every"),
    said("trainer.val_before_train", "evaluations.NAME.at", "`start`"),
    unsaid("trainer.val_only", "an evaluation is part of a run"),
    unsaid("trainer.critic_warmup", "actor and critic learn from the first step on"),
    unsaid("trainer.balance_batch", "micro-batches always fill by tokens"),
    said("ray_kwargs.ray_init", "--address"),
)
VERL: Mapping[str, tuple[ForeignName, ...]] = {
    "data": _DATA,
    "actor_rollout_ref.model": _MODEL,
    "actor_rollout_ref.actor and ref": _TRAINING,
    "actor_rollout_ref.rollout": _SAMPLING,
    "algorithm, critic and reward": _ALGORITHM,
    "trainer": _TRAINER,
}
