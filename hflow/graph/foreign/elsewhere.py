"""Names that many libraries have, sections of theirs, and our own where people look for them first."""

from __future__ import annotations

from hflow.graph.foreign.foreign_name import said, unsaid

ELSEWHERE = (
    said("stop_strings, stop_sequences, stop_words", "stop of generate"),
    said("eos_token_id, stop_token_ids, stop_tokens", "stop_token_ids of generate"),
    said("max_tokens, max_new_tokens, max_gen_len", "max_new_tokens of generate"),
    said("num_samples, num_return_sequences, group_size, rollouts_per_prompt", "n of generate"),
    said("scheduler, lr_scheduler, lr_schedule, lr_decay_style", "schedule of train"),
    said("beta1, beta2, beta_1, beta_2", "betas of train", "both: `betas: [0.9, 0.999]`"),
    said("adam_eps, adam_epsilon, epsilon_adam", "eps of train"),
    said("grad_clip, clip_grad, clip_grad_norm, gradient_clip, gradient_clipping", "clip_grad of train"),
    said("wandb, tensorboard, mlflow, trackers, tracker, loggers", "run.trackers"),
    said("wandb_project, wandb_name", "run.trackers", "the project: `WANDB_PROJECT`, or the graph's name"),
    unsaid("swanlab, comet, trackio", "`run.trackers` has `tensorboard`, `wandb` and `mlflow`"),
    said("checkpoint, checkpointing, checkpoint_every, save_every", "run.checkpoint.every"),
    said("eval_every, eval_interval, eval_freq", "evaluations.NAME.every"),
    said(
        "kl_coef, kl_coeff, init_kl_coef, kl_beta",
        "kl_coef of hflow.ops.losses.ppo_clip, kl_coef of hflow.ops.shaping.token_rewards",
        "in the loss, or in the rewards",
    ),
    said("clip_range, clip_eps, eps_clip, ppo_clip", "clip of hflow.ops.losses.ppo_clip"),
    said("chat_template", "chat_template of data"),
    said("system_prompt", "system of data"),
    said("tokenizer, tokenizer_path, tokenizer_name", "tokenizer of data", "name the model that has it"),
    said("epochs, num_epochs, n_epochs", "repeat.epochs of train, loop.times", "over a step's rows; steps"),
    said("train_batch_size, global_batch_size, rollout_batch_size", "batch of data", "prompts of a step"),
    said("mini_batch_size, minibatch_size", "repeat.minibatch of train", "rows of an optimizer step"),
    said("micro_batch_size, micro_train_batch_size", "--pin", "`--pin actor_train=micro4`"),
    said("tensor_parallel_size, tp_size, pipeline_parallel_size", "--pin", "the compiler decides"),
    said("num_gpus, n_gpus, num_nodes, gpus_per_node, num_processes", "--cluster"),
    said("backend, engine, rollout_engine, inference_engine", "--engine", "`--engine rollout=sglang`"),
    said("torch_dtype, precision, mixed_precision", "models.NAME.dtype", "`bf16` or `f32`"),
    said("ema, ema_decay", "models.NAME.refresh.decay", "of a frozen model that follows a trained one"),
    said("lora, lora_rank, peft", "models.NAME.adapter.rank", "a model with an adapter trains that alone"),
    unsaid("qlora", "weights are f32 or bf16 (`dtype` of a model)"),
    said("actor_rollout_ref, actor, critic, ref, reference", "models", "and the nodes that use them"),
    said("algorithm", "extends", "a file in algorithms/, such as `grpo`, whose nodes are the algorithm"),
    said("trainer, training_args, training_arguments", "run, loop.times", "and the options of `train` nodes"),
    said("data, dataset", "dataset of data"),
    said("rollout, sampling_params, generation_config", "nodes", "options of `generate` nodes"),
    said("reward, reward_fn, reward_func, reward_function, custom_reward_function", "fn of call"),
    said("reward_model, value_model, cost_model", "models.NAME.head", "`scalar`, read by a `score` node"),
)
