"""Settings that may differ when a program goes on with a run: how long it lasts, where its files and peers are, how it
computes the same, and what the user may steer by hand. All others decide the run's result and must stay. A key stands
for all below it; members of a list have the list's key. That the base model is the same is checked by its identity.
"""

from grpo.configs.infer import InferSettings

TRAINER_MAY_CHANGE = frozenset(
    {
        *("max_steps", "wait_timeout_s", "ckpt", "resume", "resume_with_changed_code"),
        *("model", "output_dir", "overwrite_output_dir", "run_id", "rollout_transport"),
        *("device", "gpus", "nodes", "min_nodes", "rendezvous", "zero_level", "num_threads", "offload"),
        *("gradient_checkpointing", "compile", "colocate", "sleep_mode"),
        *("learning_rate", "lr_scheduler_type", "decay_steps", "warmup_steps"),
        *("weight_broadcast.type", "weight_broadcast.timeout", "transport_type", "logging_steps", "max_async_level"),
        *("weight_broadcast.keep_last", "weight_broadcast.keep_interval"),
        *("weight_broadcast.host", "weight_broadcast.port", "weight_broadcast.key_var"),
        "weight_broadcast.inference_world_size",
    }
)
ORCHESTRATOR_MAY_CHANGE = frozenset(
    {
        *("max_steps", "wait_timeout_s", "ckpt", "resume", "resume_with_changed_code"),
        *("model.name", "model.lora_adapter", "output_dir", "run_id", "rollout_transport", "weight_broadcast"),
        *("client", "teacher_model.client", "hints.model.base_url", "preferences.teachers.base_url"),
        *("env.address", "env.num_workers", "env.memory_gb", "reward_timeout_s", "max_env_failure_rate"),
        *("max_concurrent_groups", "sleep_mode"),
        *("buffer.easy_fraction", "buffer.hard_fraction"),
        *("eval", "traces", "report_to"),
    }
)
SERVER_MAY_CHANGE = frozenset(InferSettings.model_fields) - {
    *("dtype", "seed", "max_model_len", "rope_scaling", "trust_remote_code", "enable_lora", "norm_noise"),
    "base_quantization",
}
