// Parses Prometheus' text format, and derives rates and quantiles from two scrapes.

const QUANTILES = [0.5, 0.9, 0.99];

export class Scrape {
  constructor(text) {
    this.seconds = performance.now() / 1000;
    this.samples = new Map(); // name without prefix -> [{labels, value}]
    const prefix = /^([\w:]*)num_requests_running\{/m.exec(text)?.[1] ?? "";
    for (const [, fullName, labels, value] of text.matchAll(/^([\w:]+)\{(.*)\} (\S+)$/gm)) {
      const name = fullName.startsWith(prefix) ? fullName.slice(prefix.length) : fullName;
      const list = this.samples.get(name) ?? [];
      list.push({ labels, value: Number(value) });
      this.samples.set(name, list);
    }
  }

  sum(name) {
    return (this.samples.get(name) ?? []).reduce((total, sample) => total + sample.value, 0);
  }

  buckets(name) {
    // [upper bound, cumulative count of all engines], in ascending order.
    const counts = new Map();
    for (const { labels, value } of this.samples.get(`${name}_bucket`) ?? []) {
      const bound = Number(/le="([^"]*)"/.exec(labels)[1].replace("+Inf", "Infinity"));
      counts.set(bound, (counts.get(bound) ?? 0) + value);
    }
    return [...counts].sort(([one], [other]) => one - other);
  }
}

export function rate(before, after, name) {
  return Math.max(0, after.sum(name) - before.sum(name)) / (after.seconds - before.seconds);
}

export function quantiles(before, after, name) {
  // The quantile of the observations between the scrapes; null if there are none. Assumes an even spread within a bucket.
  const old = new Map(before.buckets(name));
  const counts = after.buckets(name).map(([bound, count]) => [bound, count - (old.get(bound) ?? 0)]);
  const total = counts.at(-1)?.[1] ?? 0;
  return QUANTILES.map((share) => (total > 0 ? interpolate(counts, share * total) : null));
}

function interpolate(counts, wanted) {
  let [lower, below] = [0, 0];
  for (const [bound, count] of counts) {
    if (count >= wanted) {
      return bound === Infinity ? lower : lower + ((bound - lower) * (wanted - below)) / (count - below);
    }
    [lower, below] = [bound, count];
  }
  return lower;
}
