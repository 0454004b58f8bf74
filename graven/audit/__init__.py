"""What a trained recurrent layer computes, read from its weights: `graven.audit.explain.explain` runs everything in order."""
