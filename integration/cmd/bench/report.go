package main

import (
	"encoding/json"
	"fmt"
	"io"
	"math"
	"os"
	"slices"
	"strings"
	"time"
)

// metrics are the figures of one run by name.
type metrics map[string]float64

// result is one run of one contender.
type result struct {
	Scenario string    `json:"scenario"`
	Variant  string    `json:"variant"`
	Round    int       `json:"round"`
	At       time.Time `json:"at"`
	Load     float64   `json:"load"` // of the machine, at the end
	Metrics  metrics   `json:"metrics"`
}

// document is what the JSON file holds.
type document struct {
	Machine    string            `json:"machine"`
	PostgreSQL string            `json:"postgresql"`
	Settings   map[string]string `json:"settings"`
	Command    []string          `json:"command"`
	Results    []result          `json:"results"`
}

// column is how a metric is shown: the order of this list is the order of the
// columns, and what is not in it is in the JSON alone.
type column struct{ name, title, format string }

var columns = []column{
	{"deliveries_per_s", "deliveries/s", "%.0f"},
	{"commits_per_s", "commits/s", "%.0f"},
	{"sent", "sent", "%.0f"},
	{"delivered", "delivered", "%.0f"},
	{"in_time", "in time", "%.0f"},
	{"missing", "missing", "%.0f"},
	{"duplicates", "duplicates", "%.0f"},
	{"requests_while_down", "requests while down", "%.0f"},
	{"recovery_s", "s to recover", "%.1f"},
	{"p50_ms", "p50 ms", "%.2f"},
	{"p99_ms", "p99 ms", "%.2f"},
	{"worker_cpu_s_per_1000", "worker CPU s/1,000", "%.4f"},
	{"pg_cpu_s_per_1000", "Postgres CPU s/1,000", "%.4f"},
	{"all_cpu_s_per_1000", "both", "%.4f"},
	{"worker_cpu_percent", "worker CPU %", "%.2f"},
	{"pg_cpu_percent", "Postgres CPU %", "%.2f"},
	{"statements_per_delivery", "statements", "%.3f"},
	{"statements_per_s", "statements/s", "%.2f"},
	{"wal_bytes_per_delivery", "WAL B", "%.0f"},
	{"growth_bytes_per_delivery", "growth B", "%.0f"},
	{"dead_tuples", "dead tuples", "%.0f"},
	{"claim_ms", "claim mean ms", "%.2f"},
	{"claim_p99_ms", "claim p99 ms", "%.2f"},
	{"claim_max_ms", "claim max ms", "%.1f"},
	{"rss_mib", "RSS MiB", "%.0f"},
}

// note keeps a result and says it.
func (b *bench) note(scenario, variant string, round int, m metrics) {
	r := result{scenario, variant, round + 1, time.Now().UTC(), load(), m}
	b.doc.Results = append(b.doc.Results, r)
	var line strings.Builder
	for _, c := range columns {
		if v, ok := m[c.name]; ok {
			fmt.Fprintf(&line, "  %s "+c.format, c.title, v)
		}
	}
	fmt.Fprintf(os.Stderr, "%s  %s  round %d  load %.1f %s\n", scenario, variant, round+1, r.Load, line.String())
}

func (b *bench) writeJSON(name string) error {
	text, err := json.MarshalIndent(b.doc, "", " ")
	if err != nil {
		return err
	}
	return os.WriteFile(name, append(text, '\n'), 0o644)
}

// writeMarkdown writes a table of medians for each scenario, and below it the
// ratios of Postern to the others: medians of what the rounds gave, with the
// least and the greatest.
func (d *document) writeMarkdown(w io.Writer) {
	fmt.Fprintf(w, "%s; PostgreSQL %s; `%s`\n", d.Machine, d.PostgreSQL, strings.Join(d.Command, " "))
	for _, scenario := range d.names(func(r result) string { return r.Scenario }, "") {
		variants := d.names(func(r result) string { return r.Variant }, scenario)
		least, greatest, rounds := d.conditions(scenario)
		fmt.Fprintf(w, "\n**%s** (rounds: %d, load %.1f to %.1f)\n\n", scenario, rounds, least, greatest)
		shown := slices.DeleteFunc(slices.Clone(columns), func(c column) bool {
			return !slices.ContainsFunc(variants, func(v string) bool { return len(d.values(scenario, v, c.name)) > 0 })
		})
		fmt.Fprint(w, "| |")
		for _, c := range shown {
			fmt.Fprintf(w, " %s |", c.title)
		}
		fmt.Fprintf(w, "\n|---|%s\n", strings.Repeat("---|", len(shown)))
		for _, v := range variants {
			fmt.Fprintf(w, "| %s |", v)
			for _, c := range shown {
				if values := d.values(scenario, v, c.name); len(values) > 0 {
					fmt.Fprintf(w, " "+c.format+" |", median(values))
				} else {
					fmt.Fprint(w, " |")
				}
			}
			fmt.Fprintln(w)
		}
		d.writeRatios(w, scenario, variants)
	}
}

func (d *document) writeRatios(w io.Writer, scenario string, variants []string) {
	if !slices.Contains(variants, postern.name) {
		return
	}
	for _, v := range variants {
		if v == postern.name {
			continue
		}
		var parts []string
		for _, c := range columns {
			if !strings.Contains(c.name, "_per_") {
				continue
			}
			ratios := d.ratios(scenario, postern.name, v, c.name)
			if len(ratios) > 0 {
				parts = append(parts, fmt.Sprintf("%s %s (%s to %s)", c.title, short(median(ratios)), short(slices.Min(ratios)), short(slices.Max(ratios))))
			}
		}
		if len(parts) > 0 {
			fmt.Fprintf(w, "\n%s to %s: %s\n", postern.name, v, strings.Join(parts, "; "))
		}
	}
}

func short(ratio float64) string {
	if ratio >= 20 {
		return fmt.Sprintf("%.0f", ratio)
	}
	return fmt.Sprintf("%.2f", ratio)
}

// names lists what pick finds in the results, each once, in their order.
func (d *document) names(pick func(result) string, scenario string) (list []string) {
	for _, r := range d.Results {
		if name := pick(r); (scenario == "" || r.Scenario == scenario) && !slices.Contains(list, name) {
			list = append(list, name)
		}
	}
	return list
}

func (d *document) conditions(scenario string) (least, greatest float64, rounds int) {
	least = math.Inf(1)
	for _, r := range d.Results {
		if r.Scenario == scenario {
			least, greatest, rounds = min(least, r.Load), max(greatest, r.Load), max(rounds, r.Round)
		}
	}
	return least, greatest, rounds
}

func (d *document) values(scenario, variant, metric string) (values []float64) {
	for _, r := range d.Results {
		if v, ok := r.Metrics[metric]; ok && r.Scenario == scenario && r.Variant == variant {
			values = append(values, v)
		}
	}
	return values
}

// ratios divides within each round, because rounds differ by what else the
// machine was doing.
func (d *document) ratios(scenario, variant, to, metric string) (list []float64) {
	value := func(name string, round int) (float64, bool) {
		for _, r := range d.Results {
			if v, ok := r.Metrics[metric]; ok && r.Scenario == scenario && r.Variant == name && r.Round == round {
				return v, true
			}
		}
		return 0, false
	}
	_, _, rounds := d.conditions(scenario)
	for round := 1; round <= rounds; round++ {
		a, okA := value(variant, round)
		b, okB := value(to, round)
		if okA && okB && b > 0 {
			list = append(list, a/b)
		}
	}
	return list
}

func median(values []float64) float64 {
	sorted := slices.Sorted(slices.Values(values))
	n := len(sorted)
	if n == 0 {
		return math.NaN()
	}
	return (sorted[(n-1)/2] + sorted[n/2]) / 2
}

// percentile returns the value that the share p of the sorted values does not
// exceed.
func percentile(sorted []time.Duration, p float64) time.Duration {
	if len(sorted) == 0 {
		return 0
	}
	return sorted[min(len(sorted)-1, int(p*float64(len(sorted))))]
}
