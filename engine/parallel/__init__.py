"""Expert parallelism: process groups of an epoch, the experts function, and the step that all ranks take together."""
