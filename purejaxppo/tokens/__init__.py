"""RLHF on token sequences as whole runs in one program: PPO against a frozen reference, GRPO and DPO."""
