"""Recipes: configurations, data builders, rewards and tools that ship with the package and run by name."""

from rally.recipes.catalog import Recipe, RecipeError, find_recipe, list_recipes

__all__ = ["Recipe", "RecipeError", "find_recipe", "list_recipes"]
