"""Recipes are folders of YAML that an installed package brings along; each runs by its name."""

from rally.recipes.catalog import Recipe, RecipeError, find_recipe, list_recipes

__all__ = ["Recipe", "RecipeError", "find_recipe", "list_recipes"]
