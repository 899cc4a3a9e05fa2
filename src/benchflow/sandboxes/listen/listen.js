// Listens on loopback ports inside a sandbox; says and does what listen.py does.
const net = require("net");
const fs = require("fs");
const [HEAD, CHUNK, WINDOW, MOST] = [9, 1 << 15, 1 << 18, 256];
const remotes = new Map();
let count = 0;
let read = Buffer.alloc(0);

function tell(kind, number = 0, value = 0, data = Buffer.alloc(0)) {
  const head = Buffer.alloc(HEAD);
  head.write(kind, 0, 1, "latin1");
  head.writeUInt32BE(number, 1);
  head.writeUInt32BE(value, 5);
  process.stdout.write(Buffer.concat([head, data]));
}

function overStreams(client, port) {
  const number = ++count;
  const remote = { client, credit: WINDOW, taken: 0 };
  remotes.set(number, remote);
  tell("O", number, port);
  client.on("data", (data) => {
    for (let at = 0; at < data.length; at += CHUNK) {
      const part = data.subarray(at, at + CHUNK);
      remote.credit -= part.length;
      tell("D", number, part.length, part);
    }
    if (remote.credit <= 0) client.pause();
  });
  client.on("end", () => tell("E", number));
  client.on("error", () => {});
  client.on("close", (failed) => {
    if (remotes.delete(number) && (failed || !client.readableEnded)) tell("X", number);
  });
}

function joined(client, target) {
  const at = target.lastIndexOf(":");
  const where = target[0] === "/" ? { path: target } : { host: target.slice(0, at), port: +target.slice(at + 1) };
  const far = net.connect({ ...where, allowHalfOpen: true });
  client.pipe(far);
  far.pipe(client);
  client.on("error", () => far.destroy());
  far.on("error", () => {});
  far.on("close", () => {
    client.end(); // and let it say the rest to nobody: it still has the answer to read
    client.resume();
  });
}

function take() {
  let start = 0;
  while (read.length - start >= HEAD) {
    const kind = String.fromCharCode(read[start]);
    const number = read.readUInt32BE(start + 1);
    const value = read.readUInt32BE(start + 5);
    const body = start + HEAD;
    const end = kind === "D" ? body + value : body;
    if (end > read.length) break;
    const data = read.subarray(body, end);
    start = end;
    const remote = remotes.get(number);
    if (!remote) continue;
    if (kind === "D") {
      remote.client.write(Buffer.from(data), (error) => {
        remote.taken += value;
        if (error || !remotes.has(number) || remote.taken < WINDOW / 2) return;
        tell("W", number, remote.taken);
        remote.taken = 0;
      });
    } else if (kind === "E") remote.client.end();
    else if (kind === "W") {
      remote.credit += value;
      if (remote.credit > 0) remote.client.resume();
    } else {
      remotes.delete(number);
      remote.client.destroySoon();
    }
  }
  read = read.subarray(start);
}

let waiting = 0;
const routes = process.argv.slice(1).filter((route) => route !== "--");
for (const route of routes) {
  const at = route.indexOf("=");
  const [port, target] = [+route.slice(0, at), route.slice(at + 1)];
  const server = net.createServer({ allowHalfOpen: true, noDelay: true }, (client) =>
    target === "-" ? overStreams(client, port) : joined(client, target),
  );
  server.maxConnections = MOST;
  server.on("error", (error) => {
    fs.writeSync(2, `port ${port}: ${error.message}\n`);
    process.exit(1);
  });
  waiting += 1;
  server.listen({ host: "127.0.0.1", port, backlog: MOST }, () => {
    waiting -= 1;
    if (!waiting) tell("R");
  });
}
process.stdin.on("data", (data) => {
  read = Buffer.concat([read, data]);
  take();
});
process.stdin.on("end", () => process.exit(0));
