package post

import (
	"testing"

	"postern/integration/harness/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }
