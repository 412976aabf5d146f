"""The names of TRL, by the class that has them (TRL 1.10, transformers 5).

`docs/from-trl.md` has the same lines, with more to say.
"""

from __future__ import annotations

from collections.abc import Mapping

from hflow.graph.foreign.foreign_name import ForeignName, said, unsaid

_CLIP = "hflow.ops.losses.ppo_clip"
_ADAM = "every train node is AdamW, with `lr`, `betas`, `eps`, `weight_decay`"
_LORA = "all weights of a trained model learn, but for those that `freeze` of `train` names"
_TRAINER = (
    said("model", "models.NAME.path", "a folder on this machine, not a name on the hub"),
    said("ref_model", "models.NAME.frozen", "a model of its own, with `frozen: true`"),
    said("reward_funcs", "fn of call", "a `call` node for each function"),
    said("train_dataset", "dataset of data"),
    said("eval_dataset", "evaluations.NAME.data"),
    said("processing_class", "tokenizer of data", "the name of the model whose folder has it"),
    said("tools", "tools of data, fn of call", "schemas for the template; a `call` node that runs them"),
    said("rollout_func, environment_factory", "nodes", "turns are nodes: `generate`, `call`, `generate`"),
    unsaid("callbacks", "a `call` node sees the values of a step; `run` says what is kept and where it goes"),
    unsaid("optimizers", _ADAM),
    unsaid("peft_config", _LORA),
    unsaid("quantization_config", "weights are f32 or bf16 (`dtype` of a model)"),
)
_TRAINING_ARGUMENTS = (
    said("learning_rate", "lr of train"),
    said("lr_scheduler_type", "schedule of train", "`constant`, `linear`, `cosine` or `wsd`"),
    said("lr_scheduler_kwargs", "min_lr of train, decay_steps of train"),
    said("warmup_steps", "warmup_steps of train", "optimizer steps, a whole number"),
    said("warmup_ratio", "warmup_steps of train", "optimizer steps, a whole number"),
    said("weight_decay", "weight_decay of train"),
    said("adam_beta1, adam_beta2", "betas of train", "both: `betas: [0.9, 0.999]`"),
    said("adam_epsilon", "eps of train"),
    said("max_grad_norm", "clip_grad of train"),
    unsaid("optim", _ADAM),
    said("max_steps", "loop.times", "steps of the graph, each with its rollout; not optimizer steps"),
    said("num_train_epochs", "loop.times", "steps, not passes: rows of the data / `batch`, for each pass"),
    said(
        "per_device_train_batch_size",
        "batch of data, repeat.minibatch of train",
        "for all devices: prompts of a step, rows of an optimizer step",
    ),
    said(
        "gradient_accumulation_steps",
        "repeat.minibatch of train",
        "rows of an optimizer step, however many fit into memory at once",
    ),
    unsaid("per_device_eval_batch_size", "the compiler chooses how many rows a device takes at once"),
    unsaid("auto_find_batch_size", "the compiler knows what fits before anything runs"),
    said("bf16, fp16", "models.NAME.dtype", "`bf16` or `f32`"),
    said("gradient_checkpointing", "--pin", "the compiler decides; `--pin actor_train=recompute` insists"),
    said("deepspeed, fsdp, parallelism_config", "--pin", "the compiler decides; `--pin actor_train=tp2,dp4`"),
    unsaid("torch_compile, use_liger_kernel", "nothing to choose: kernels are the engine's"),
    unsaid("label_smoothing_factor, neftune_noise_alpha", "texts are learned as they are"),
    unsaid("average_tokens_across_devices", "means are always over the whole update, on all devices"),
    unsaid("dataloader_num_workers, dataloader_drop_last", "rows are drawn by the workers themselves"),
    said("remove_unused_columns", "out of data", "nodes read the columns that `out` names"),
    said("seed, data_seed", "seed", "of the file; one for data order and sampling"),
    said("run_name", "name", "of the file"),
    said("output_dir", "--run-dir"),
    unsaid("logging_steps, logging_strategy", "every step is a line of metrics.jsonl"),
    said("report_to", "run.trackers", "`tensorboard`, `wandb`, `mlflow`"),
    said("eval_strategy, eval_steps", "evaluations.NAME.every"),
    said("eval_on_start", "evaluations.NAME.at"),
    said("save_strategy, save_steps", "run.checkpoint.every"),
    said("save_total_limit", "run.checkpoint.keep"),
    unsaid("save_only_model", "checkpoints hold the optimizer; `hflow export` writes the model from one"),
    said("metric_for_best_model", "run.checkpoint.best"),
    said("greater_is_better", "run.checkpoint.mode"),
    said("load_best_model_at_end", "run.export", "`best` exports the best checkpoint"),
    said("resume_from_checkpoint", "--resume"),
    unsaid("push_to_hub", "`export/` in the run folder is a Hugging Face folder, ready to upload"),
)
_GRPO = (
    said("num_generations", "n of generate"),
    said("num_generations_eval", "evaluations.NAME.sampling"),
    said("max_completion_length", "max_new_tokens of generate"),
    said("max_prompt_length", "max_prompt_tokens of data", "longer rows are dropped, not cut"),
    said("shuffle_dataset", "shuffle of data"),
    said("generation_batch_size", "batch of data", "prompts, not responses"),
    said("steps_per_generation", "repeat.minibatch of train", "rows of an optimizer step"),
    said("num_iterations", "repeat.epochs of train"),
    said("temperature", "temperature of generate"),
    said("top_p", "top_p of generate", "with `max_kept`, where log-probs are compared"),
    said("top_k", "top_k of generate", "with `max_kept`, where log-probs are compared"),
    said("min_p", "min_p of generate", "with `max_kept`, where log-probs are compared"),
    unsaid("repetition_penalty", "samplers have `temperature`, `top_p`, `top_k` and `min_p`"),
    said("generation_kwargs", "stop of generate, stop_token_ids of generate"),
    said("chat_template_kwargs", "template_args of data"),
    said(
        "use_vllm, use_transformers_continuous_batching, use_transformers_paged",
        "--engine",
        "`--engine rollout=sglang`",
    ),
    said("vllm_mode", "--pin", "the compiler decides; `--pin rollout=@4-7` gives it devices of its own"),
    said("vllm_tensor_parallel_size", "--pin", "the compiler decides; `--pin rollout=tp2` insists"),
    unsaid("vllm_enable_sleep_mode", "the compiler decides what waits in the host's memory"),
    unsaid("vllm_gpu_memory_utilization, vllm_max_model_length", "the plan counts what a rollout needs"),
    unsaid(
        "vllm_server_base_url, vllm_server_host, vllm_server_port, vllm_server_timeout, vllm_group_port",
        "workers start the servers themselves",
    ),
    unsaid("vllm_structured_outputs_regex, vllm_model_impl", "responses are sampled freely"),
    said(
        "vllm_importance_sampling_correction, vllm_importance_sampling_clip_max, "
        "vllm_importance_sampling_cap",
        f"importance_cap of {_CLIP}",
        "with inputs `old_logprobs` of a `score` node and `rollout_logprobs` of the rollout",
    ),
    unsaid(
        "vllm_importance_sampling_mode, vllm_importance_sampling_clip_min",
        "weights are of tokens, and cut from above by `importance_cap`",
    ),
    said("beta", f"kl_coef of {_CLIP}", "with `ref_logprobs` of a frozen model"),
    said("epsilon", f"clip of {_CLIP}"),
    said("epsilon_high", f"clip_high of {_CLIP}"),
    said("delta", f"dual_clip of {_CLIP}"),
    said("importance_sampling_level", "loss of train", "`sequence` is `hflow.ops.sequence_losses.gspo`"),
    said("loss_type", "loss of train, aggregate of train"),
    said("scale_rewards", "std of hflow.ops.advantages.group_normalise", "`sample` or `none`"),
    said("reward_weights", "weight of hflow.ops.rewards.add"),
    said(
        "multi_objective_aggregation",
        "hflow.ops.advantages.group_normalise",
        "before `hflow.ops.rewards.add` or after it",
    ),
    said("mask_truncated_completions", "mask_truncated of generate"),
    said("sync_ref_model", "models.NAME.refresh"),
    said("ref_model_sync_steps", "models.NAME.refresh.every"),
    said("ref_model_mixup_alpha", "models.NAME.refresh.decay", "1 - alpha"),
    said("entropy_coef", f"entropy_coef of {_CLIP}"),
    unsaid(
        "use_adaptive_entropy, entropy_coef_min, entropy_coef_max, entropy_coef_delta, entropy_target",
        "`entropy_coef` is fixed",
    ),
    unsaid(
        "top_entropy_quantile, off_policy_mask_threshold, use_bias_correction_kl",
        "a loss of your own can read `entropy` and `old_logprobs`",
    ),
    unsaid("max_tool_calling_iterations", "each turn is a `generate` node"),
    said("log_completions, num_completions_to_print, log_unique_prompts", "run.samples"),
    unsaid("log_completions_hub_repo", "samples are Parquet files in the run folder"),
    said("model_init_kwargs", "models.NAME.dtype", "nothing else of it"),
    unsaid("trust_remote_code", "no code of a model or a dataset is run"),
    unsaid("disable_dropout", "there is no dropout"),
    unsaid("router_aux_loss_coef, cast_lm_head_to_fp32", "the loss is what the graph says, no more"),
    unsaid("ds3_gather_for_generation, cache_implementation, pad_to_multiple_of", "the engine's business"),
)
_SFT = (
    said("dataset_text_field", "prompt of data, response of data", "templates, `{{ text }}`"),
    said("max_length, max_seq_length", "max_prompt_tokens of data, max_response_tokens of data"),
    unsaid("truncation_mode", "rows that are too long are dropped and counted, never cut"),
    unsaid(
        "packing, packing_strategy, padding_free, eval_packing",
        "rows keep apart; micro-batches fill by tokens",
    ),
    unsaid("completion_only_loss", "always: only responses are learned"),
    said("assistant_only_loss", "learn of data", "always, of `messages`; `last`: the last answer alone"),
    said("loss_type", "loss of train", "`nll` is `hflow.ops.losses.negative_log_likelihood`"),
    said("chat_template_path", "chat_template of data"),
    unsaid("eos_token, pad_token", "tokenizer_config.json in the model's folder names it"),
    unsaid("dataset_num_proc, dataset_kwargs", "workers render the rows that they draw"),
    unsaid("activation_offloading", "`--pin actor_train=recompute` saves activations"),
)
_DPO = (
    said("beta", "beta of hflow.ops.preferences.dpo"),
    said("label_smoothing", "label_smoothing of hflow.ops.preferences.dpo"),
    said("loss_type", "loss of train", "`sigmoid` is `hflow.ops.preferences.dpo`"),
    unsaid(
        "loss_weights, f_divergence_type, ld_alpha, use_weighting, discopop_tau",
        "a loss of your own, over `pairs*k`",
    ),
    unsaid("precompute_ref_log_probs, precompute_ref_batch_size", "the reference scores each step's rows"),
    said("model_adapter_name, ref_adapter_name", "models.NAME", "each model is a folder of its own"),
)
_REWARD = (
    said("center_rewards_coefficient", "centre_coef of hflow.ops.pairwise.bradley_terry"),
    said("max_length", "max_prompt_tokens of data, max_response_tokens of data"),
)
_PPO = (
    said("sft_model_path, reward_model_path", "models.NAME.path"),
    said("response_length", "max_new_tokens of generate"),
    said("stop_token, stop_token_id", "stop_token_ids of generate", "beside the tokenizer's end token"),
    said("missing_eos_penalty", "fn of call", "a function that reads `finish` of the rollout"),
    said("total_episodes", "loop.times", "episodes / `batch`"),
    said("num_ppo_epochs", "repeat.epochs of train"),
    said("num_mini_batches, mini_batch_size", "repeat.minibatch of train", "rows of an optimizer step"),
    said("batch_size", "batch of data", "prompts of a step"),
    said("local_rollout_forward_batch_size, micro_batch_size", "--pin", "`--pin values=micro4`"),
    said("cliprange", f"clip of {_CLIP}"),
    said("cliprange_value", "clip of hflow.ops.values.value_clip"),
    unsaid("vf_coef", "the critic has a train node of its own, with its own `lr`"),
    said("kl_coef", "kl_coef of hflow.ops.shaping.token_rewards"),
    unsaid("kl_estimator", "rewards take k1; a loss takes what its option `kl` says"),
    said("gamma", "gamma of hflow.ops.gae.gae"),
    said("lam", "lam of hflow.ops.gae.gae"),
    said("whiten_rewards", "hflow.ops.whitening.whiten", "`shift_mean: false`, over the rewards"),
    said("num_sample_generations", "run.samples"),
)
_MODEL = (
    said("model_name_or_path", "models.NAME.path", "a folder on this machine"),
    unsaid("model_revision", "models are folders on this machine"),
    said("dtype, torch_dtype", "models.NAME.dtype", "`bf16` or `f32`"),
    unsaid("attn_implementation", "the engine's business"),
    unsaid("use_peft, lora_r, lora_alpha, lora_dropout, lora_target_modules, use_dora, use_rslora", _LORA),
    unsaid("load_in_8bit, load_in_4bit", "weights are f32 or bf16 (`dtype` of a model)"),
)
TRL: Mapping[str, tuple[ForeignName, ...]] = {
    "Arguments of trainers": _TRAINER,
    "TrainingArguments": _TRAINING_ARGUMENTS,
    "GRPOConfig": _GRPO,
    "SFTConfig": _SFT,
    "DPOConfig": _DPO,
    "RewardConfig": _REWARD,
    "PPOConfig": _PPO,
    "ModelConfig": _MODEL,
}
