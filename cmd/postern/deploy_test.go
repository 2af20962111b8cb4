package main

import (
	"fmt"
	"os"
	"reflect"
	"strconv"
	"strings"
	"testing"
)

// A unit must let its program take what the default settings allow, by the rates
// in their help texts, and a quarter more.
func TestUnitsLeaveRoomForTheDefaults(t *testing.T) {
	t.Parallel()
	const perConnection, base = 60 << 10, 50 << 20 // with TLS; of a program that holds nothing
	run := 3*size(t, runSettings{}, "MemoryLimit") + count(t, runSettings{}, "IdleConnections")*perConnection + base
	const perSender, copies = 32 << 10, 4
	receive := copies*size(t, receiveSettings{}, "ReceiveMemory") + count(t, receiveSettings{}, "ReceiveSenderConnections")*perSender + base
	for unit, needs := range map[string]int64{"postern": run, "postern-receive": receive} {
		value := directive(t, unit, "MemoryMax")
		number, err := strconv.ParseInt(value[:len(value)-1], 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		limit := number << map[byte]int{'M': 20, 'G': 30}[value[len(value)-1]]
		if limit < needs+needs/4 {
			t.Errorf("%s.service: MemoryMax=%s; the defaults may take %d MiB, and a quarter more is %d MiB", unit, value, needs>>20, (needs+needs/4)>>20)
		}
	}
}

// Wrong settings and a database that refuses for good are not mended by a restart.
func TestUnitsDoNotRestartWhatIsPermanent(t *testing.T) {
	t.Parallel()
	for _, unit := range []string{"postern", "postern-receive"} {
		if got, want := directive(t, unit, "RestartPreventExitStatus"), fmt.Sprint(exitUsage, " ", exitRefused); got != want {
			t.Errorf("%s.service: RestartPreventExitStatus=%s, want %s", unit, got, want)
		}
	}
}

// directive returns the value of a line of a unit in deploy.
func directive(t *testing.T, unit, name string) string {
	t.Helper()
	text, err := os.ReadFile("../../deploy/" + unit + ".service")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		if value, found := strings.CutPrefix(line, name+"="); found {
			return strings.TrimSpace(value)
		}
	}
	t.Fatalf("%s.service has no %s", unit, name)
	return ""
}

// byDefault returns a setting's default as it is documented.
func byDefault(t *testing.T, settings any, field string) string {
	t.Helper()
	f, found := reflect.TypeOf(settings).FieldByName(field)
	if !found {
		t.Fatalf("no setting %s", field)
	}
	return f.Tag.Get("default")
}

func count(t *testing.T, settings any, field string) int64 {
	t.Helper()
	n, err := strconv.ParseInt(byDefault(t, settings, field), 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func size(t *testing.T, settings any, field string) int64 {
	t.Helper()
	n, err := parseSize(byDefault(t, settings, field))
	if err != nil {
		t.Fatal(err)
	}
	return int64(n)
}
