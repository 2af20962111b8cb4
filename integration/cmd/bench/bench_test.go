package main

import (
	"math"
	"strings"
	"testing"
	"time"
)

func TestReport(t *testing.T) {
	d := document{Machine: "m", PostgreSQL: "15", Command: []string{"bench"}, Results: []result{
		{Scenario: "s", Variant: "raw", Round: 1, Load: 1, Metrics: metrics{"deliveries_per_s": 100}},
		{Scenario: "s", Variant: "Postern", Round: 1, Load: 2, Metrics: metrics{"deliveries_per_s": 80}},
		{Scenario: "s", Variant: "raw", Round: 2, Load: 3, Metrics: metrics{"deliveries_per_s": 10}},
		{Scenario: "s", Variant: "Postern", Round: 2, Load: 1, Metrics: metrics{"deliveries_per_s": 6}},
	}}
	var b strings.Builder
	d.writeMarkdown(&b)
	for _, want := range []string{
		"**s** (rounds: 2, load 1.0 to 3.0)",
		"| raw | 55 |",
		"| Postern | 43 |",
		"Postern to raw: deliveries/s 0.70 (0.60 to 0.80)", // within rounds, not of the medians
	} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("%q is missing:\n%s", want, b.String())
		}
	}
}

func TestPercentile(t *testing.T) {
	var list []time.Duration
	for i := range 100 {
		list = append(list, time.Duration(i))
	}
	for p, want := range map[float64]time.Duration{0: 0, 0.5: 50, 0.99: 99, 1: 99} {
		if got := percentile(list, p); got != want {
			t.Errorf("percentile %v is %d, want %d", p, got, want)
		}
	}
}

func TestAddresses(t *testing.T) {
	seen := map[string]bool{}
	for i := range 11_000 {
		a := address(80, i)
		if seen[a] {
			t.Fatalf("destination %d has the address %s of another", i, a)
		}
		seen[a] = true
	}
}

func TestQuantile(t *testing.T) {
	earlier := []bucket{{1, 5}, {2, 5}, {4, 5}, {math.Inf(1), 5}}
	later := []bucket{{1, 5 + 50}, {2, 5 + 90}, {4, 5 + 100}, {math.Inf(1), 5 + 100}}
	for q, want := range map[float64]float64{0.25: 0.5, 0.5: 1, 0.7: 1.5, 0.95: 3, 1: 4} {
		if got := quantile(q, earlier, later); math.Abs(got-want) > 1e-9 {
			t.Errorf("quantile %g: got %g, want %g", q, got, want)
		}
	}
	later[3].count += 900
	if got := quantile(0.99, earlier, later); got != 4 {
		t.Errorf("beyond the last limit: got %g, want 4", got)
	}
}
