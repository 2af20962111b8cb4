package main

import (
	"bytes"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"postern/integration/harness/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// However many copies come at once, through one process or many, at every
// isolation level: one is processed, all others are duplicates, nothing fails.
func TestStorm(t *testing.T) {
	t.Parallel()
	storms(t, 40, 3)
}

// storms takes the rounds of 20 and of 200 copies.
func storms(t *testing.T, twenty, twoHundred int) {
	for _, level := range []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable} {
		for _, s := range []storm{
			{Copies: 20, Receivers: 1, Pool: 5, Rounds: twenty},
			{Copies: 20, Receivers: 20, Pool: 1, Rounds: twenty}, // every copy meets the others in the database alone
			{Copies: 200, Receivers: 1, Pool: 5, Rounds: twoHundred},
			{Copies: 200, Receivers: 4, Pool: 5, Rounds: twoHundred},
		} {
			// The machine may be slow and busy; what is asserted is the outcome.
			s.Isolation, s.Wait = level, 20*time.Second
			t.Run(fmt.Sprintf("%s/%d copies/%d receivers", level, s.Copies, s.Receivers), func(t *testing.T) {
				r, err := s.run(t.Context(), pgtest.EmptyDB(t).URL)
				if err != nil {
					t.Fatal(err)
				}
				if err := r.verdict(); err != nil {
					t.Fatalf("%v\n%+v", err, r)
				}
			})
		}
	}
}

// The command prints what people and scripts read, and fails with the verdict.
func TestCommand(t *testing.T) {
	t.Setenv("DATABASE_URL", pgtest.EmptyDB(t).URL)
	var out bytes.Buffer
	if err := run(t.Context(), []string{"-copies", "5", "-rounds", "2", "-wait", "20s"}, &out); err != nil {
		t.Fatalf("%v\n%s", err, &out)
	}
	for _, want := range []string{`"requests": 10`, `"processed": 2`, `"duplicates": 8`, "\nPASS: of 10 copies 2 were processed"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("the output lacks %s:\n%s", want, &out)
		}
	}
	for _, args := range [][]string{{"-copies", "0"}, {"-isolation", "chaos"}, {"-pool", "100000"}} {
		if err := run(t.Context(), args, &out); err == nil {
			t.Errorf("%v is accepted", args)
		}
	}
}

func TestVerdict(t *testing.T) {
	t.Parallel()
	good := result{Requests: 20, Rounds: 1, Processed: 1, Duplicates: 19, Effects: 1}
	if err := good.verdict(); err != nil {
		t.Error(err)
	}
	for name, spoil := range map[string]func(*result){
		"processed twice":  func(r *result) { r.Processed, r.Duplicates = 2, 18 },
		"never processed":  func(r *result) { r.Processed, r.Duplicates = 0, 20 },
		"two effects":      func(r *result) { r.Effects = 2 },
		"busy":             func(r *result) { r.Busy, r.Duplicates = 1, 18 },
		"an error":         func(r *result) { r.Errors, r.Duplicates = 1, 18 },
		"a deadlock":       func(r *result) { r.Deadlocks = 1 },
		"rounds that even": func(r *result) { r.OddRounds = 2 },
	} {
		r := good
		spoil(&r)
		if r.verdict() == nil {
			t.Errorf("%s: passes", name)
		}
	}
}
