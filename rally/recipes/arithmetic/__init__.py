"""Recipe data of the demo: arithmetic problems for a calculator tool."""
