// The smallest and the largest of any number of numbers; spread into arguments, a long list would be too much.

export function extent(values) {
  return values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);
}
