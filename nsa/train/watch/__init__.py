"""What is noticed, said and done when something goes wrong or somebody asks."""
