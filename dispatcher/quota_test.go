package dispatcher

import (
	"fmt"
	"strings"
	"testing"
	"time"
	"unicode/utf8"
)

// A destination that answers with noise has the first of it stored whole, then
// little, then some again; others are not concerned.
func TestAnswerQuota(t *testing.T) {
	t.Parallel()
	var q answerQuota
	now := time.Now()
	noise := strings.Repeat("é", 8<<10)
	stored := func(destination string, n int) (bytes, whole int) {
		for range n {
			text := q.trim(destination, noise, now)
			if !utf8.ValidString(text) || !strings.HasPrefix(noise, text) {
				t.Fatalf("%.20q is stored", text)
			}
			bytes += len(text)
			if len(text) == len(noise) {
				whole++
			}
		}
		return bytes, whole
	}
	if bytes, whole := stored("noisy", 1000); whole != 16 || bytes > 16*len(noise)+984*quotaBeyond {
		t.Errorf("%d bytes, %d whole answers of 1000; want 16", bytes, whole)
	}
	if _, whole := stored("another", 1); whole != 1 {
		t.Error("another destination's answer is cut")
	}
	if text := q.trim("noisy", "short", now); text != "short" {
		t.Errorf("a short answer is stored as %q", text)
	}
	now = now.Add(time.Hour)
	if _, whole := stored("noisy", 100); whole != 4 {
		t.Errorf("an hour later %d answers are whole, want 4", whole)
	}
	for i := range 3 * maxQuotas {
		q.trim(fmt.Sprint(i), noise, now)
	}
	if len(q.used) > maxQuotas {
		t.Errorf("%d destinations are remembered", len(q.used))
	}
}
