"""What commands share: progress, pictures, chat prompts, facts about the machine.  Nothing of the engine."""
