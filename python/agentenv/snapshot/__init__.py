"""takes stacks from `layer`, gives resumable points to `sandbox`: the door of a later issue."""
