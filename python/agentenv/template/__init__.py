"""takes images from `layer`, gives `node` what a sandbox is made from: names, tags, builds."""
