// What a user of the official JavaScript SDK does; as e2b_flow.py, for what differs between them.
// `node e2b_flow.mjs` beside the SDK's node_modules, with E2B_API_URL, E2B_SANDBOX_URL, E2B_API_KEY.
import assert from 'node:assert/strict'
import { CommandExitError, NotFoundError, Sandbox, TimeoutError } from 'e2b'

const sandbox = await Sandbox.create('base', {
  timeoutMs: 600_000,
  requestTimeoutMs: 300_000,
  metadata: { purpose: 'compat test' },
  envs: { FROM_CREATE: 'yes' },
})

const until = async (condition) => {
  const deadline = Date.now() + 60_000
  while (!condition()) {
    assert.ok(Date.now() < deadline, `condition not met: ${condition}`)
    await new Promise((resolve) => setTimeout(resolve, 20))
  }
}

const steps = {
  async commandsWithOutputExitCodesAndDeadlines() {
    const done = await sandbox.commands.run('echo out; echo err >&2; echo $FROM_CREATE')
    assert.equal(done.stdout, 'out\nyes\n')
    assert.equal(done.stderr, 'err\n')
    await assert.rejects(sandbox.commands.run('exit 3'), (error) => {
      return error instanceof CommandExitError && error.exitCode === 3
    })
    await assert.rejects(sandbox.commands.run('sleep 60', { timeoutMs: 1000 }), TimeoutError)
  },

  async backgroundWithStdin() {
    let seen = ''
    const handle = await sandbox.commands.run('cat', {
      background: true,
      stdin: true,
      onStdout: (text) => { seen += text },
    })
    await sandbox.commands.sendStdin(handle.pid, 'typed\n')
    await until(() => seen === 'typed\n')
    assert.ok((await sandbox.commands.list()).some((one) => one.pid === handle.pid))
    assert.equal(await sandbox.commands.kill(handle.pid), true)
    await assert.rejects(handle.wait(), CommandExitError)
  },

  async filesOneAndSeveral() {
    const data = new Uint8Array(3_000_000).map((_, index) => index % 251)
    await sandbox.files.write('/tmp/flow/binary', new Blob([data]))
    const back = await sandbox.files.read('/tmp/flow/binary', { format: 'bytes' })
    assert.deepEqual(Buffer.from(back), Buffer.from(data))
    await sandbox.files.write([
      { path: '/tmp/flow/one', data: '1' },
      { path: '/tmp/flow/two', data: '2' },
    ])
    const names = (await sandbox.files.list('/tmp/flow')).map((entry) => entry.name)
    assert.deepEqual(names, ['binary', 'one', 'two'])
    await assert.rejects(sandbox.files.read('/tmp/none'), NotFoundError)
    assert.equal(await sandbox.files.exists('/tmp/none'), false)
  },

  async foldersAreWatched() {
    const seen = []
    const watch = await sandbox.files.watchDir('/tmp/flow', (event) => {
      seen.push(`${event.type} ${event.name}`)
    })
    await sandbox.files.write('/tmp/flow/new', 'x')
    await until(() => seen.length >= 3)
    assert.deepEqual(seen, ['create new', 'chmod new', 'write new'])
    await watch.stop()
  },

  async terminals() {
    let seen = ''
    const handle = await sandbox.pty.create({
      cols: 100,
      rows: 30,
      onData: (data) => { seen += Buffer.from(data).toString() },
    })
    await sandbox.pty.sendInput(handle.pid, new TextEncoder().encode('stty size; exit 4\n'))
    await assert.rejects(handle.wait(), (error) => error.exitCode === 4)
    assert.ok(seen.includes('30 100'), seen)
  },

  async signedUrlsNeedNothingElse() {
    const form = new FormData()
    form.append('file', new Blob(['by url']))
    const up = await fetch(await sandbox.uploadUrl('/tmp/flow/signed'), { method: 'POST', body: form })
    assert.equal(up.status, 200, await up.text())
    const url = await sandbox.downloadUrl('/tmp/flow/signed', { useSignatureExpiration: 60 })
    assert.equal(await (await fetch(url)).text(), 'by url')
  },

  async metricsAndNetwork() {
    let samples = []
    const deadline = Date.now() + 30_000
    while (samples.length === 0) {
      assert.ok(Date.now() < deadline)
      samples = await sandbox.getMetrics()
    }
    assert.ok(samples[0].memTotal > samples[0].memUsed)
    await sandbox.updateNetwork({ denyOut: ['0.0.0.0/0'], allowOut: ['192.0.2.1'] })
    assert.deepEqual((await sandbox.getInfo()).network.denyOut, ['0.0.0.0/0'])
    await sandbox.updateNetwork({})
  },

  async webSocketsReachAPort() {
    const echo = `
import base64, hashlib, socket
server = socket.create_server(('0.0.0.0', 8200))
print('up', flush=True)
while True:
    peer = server.accept()[0]
    head = b''
    while b'\\r\\n\\r\\n' not in head: head += peer.recv(4096)
    key = [l.split(b': ')[1] for l in head.split(b'\\r\\n') if l.lower().startswith(b'sec-websocket-key')][0]
    accept = base64.b64encode(hashlib.sha1(key + b'258EAFA5-E914-47DA-95CA-C5AB0DC85B11').digest())
    peer.sendall(b'HTTP/1.1 101 X\\r\\nUpgrade: websocket\\r\\nConnection: Upgrade\\r\\nSec-WebSocket-Accept: ' + accept + b'\\r\\n\\r\\n')
    peer.sendall(b'\\x81\\x05hello')
`
    await sandbox.files.write('/tmp/flow/echo.py', echo)
    let up = ''
    const handle = await sandbox.commands.run('python3 /tmp/flow/echo.py', {
      background: true,
      onStdout: (text) => { up += text },
    })
    await until(() => up === 'up\n')
    const port = new URL(process.env.E2B_SANDBOX_URL).port
    const socket = new WebSocket(`ws://127.0.0.1:${port}/`, {
      headers: { 'E2b-Sandbox-Id': sandbox.sandboxId, 'E2b-Sandbox-Port': '8200' },
    })
    let heard = ''
    socket.onmessage = (event) => { heard += event.data }
    await until(() => heard === 'hello')
    socket.close()
    await handle.kill()
  },

  async infoListTimeoutAndKill() {
    assert.equal((await sandbox.getInfo()).metadata.purpose, 'compat test')
    await sandbox.setTimeout(900_000)
    const listed = await Sandbox.list({ query: { metadata: { purpose: 'compat test' } } }).nextItems()
    assert.ok(listed.some((one) => one.sandboxId === sandbox.sandboxId))
    const again = await Sandbox.connect(sandbox.sandboxId)
    assert.equal((await again.commands.run('echo connected')).stdout, 'connected\n')
    assert.equal(await sandbox.kill(), true)
    assert.equal(await sandbox.isRunning(), false)
    await assert.rejects(Sandbox.connect(sandbox.sandboxId))
  },
}

try {
  for (const [name, step] of Object.entries(steps)) {
    await step()
    console.log(`held ${name}`)
  }
} finally {
  await Sandbox.kill(sandbox.sandboxId)
}
