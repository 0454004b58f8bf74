"""The three kinds of model that write and answer; `graven.model.load` opens one."""
