"""What the engines have in their caches, as they tell it themselves."""
